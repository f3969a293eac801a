"""Servers that end: ours are started again and what killed them is found alone; named ones are waited for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from stub_server import Capture, StubServer, states_of

from slipstream.config import FeaturesConfig
from slipstream.digest import digest_tokens
from slipstream.errors import ServerError, TransientError
from slipstream.features import capture
from slipstream.features.capture import Outcome
from slipstream.features.lease import Lease
from slipstream.features.pool import FeaturePool
from slipstream.progress import Progress, silent
from slipstream.serving import Endpoint

pytestmark = pytest.mark.usefixtures("no_backoff")
Rows = Sequence[tuple[int, Sequence[int]]]
ROWS: Rows = [(i, [100 + i, 1, 2, 3]) for i in range(20)]
DEATH = "log: the server ended with status 137: killed"


class Owned:
    """A server of ours: it dies by going away, and every time it is lent it lives again."""

    def __init__(self, stub: StubServer) -> None:
        self.stub, self.lent, self.dead = stub, 0, False

    def die(self) -> None:
        self.dead = True
        self.stub.away()

    @contextmanager
    def __call__(self) -> Iterator[Lease]:
        self.lent += 1
        self.dead = False
        self.stub.back()
        lease = Lease(Endpoint(self.stub.url, "stub"), self.stub.storage, lambda: DEATH if self.dead else None, True)
        yield lease


def features(**more: Any) -> FeaturesConfig:
    given: dict[str, Any] = {"layer_ids": [1, 2, 3], "concurrency": 4, "request_timeout_s": 20, "max_attempts": 1}
    return FeaturesConfig(**given | {"disk_reserve_gib": 0} | more)


def asked(stub: StubServer) -> Counter[int]:
    """How often each row of ROWS was asked for."""
    return Counter(body["prompt"][0] - 100 for body in stub.asked("/v1/completions") if body["prompt"] != [1])


def assert_whole(pool: FeaturePool, rows: Rows) -> None:
    for _, tokens in rows:
        held = load_file(pool.path(digest_tokens(tokens)))
        assert held["token_ids"].tolist() == list(tokens)
        assert np.array_equal(held["hidden_states"], states_of(tokens, 4, 8))


def dying(server: Owned, *, when: Callable[[list[int], int], bool], **reply: Any) -> None:
    """The server dies with the request for which `when(tokens, number)` holds, the answer to it never comes."""

    def decide(tokens: list[int], number: int) -> Capture:
        if when(tokens, number):
            server.die()
        return Capture(**{"delay_s": 0.02} | reply)

    server.stub.on_capture(decide)


def test_a_server_that_dies_is_started_again_and_nothing_is_lost(stub: StubServer, pool: FeaturePool) -> None:
    server = Owned(stub)
    dying(server, when=lambda tokens, number: number == 9)
    began = time.monotonic()
    outcome = capture.capture(ROWS, server, pool, features(), silent)
    assert time.monotonic() - began < 15  # request_timeout_s is 20: nobody waited for it
    assert (outcome.captured, outcome.lost, outcome.restarts, server.lent) == (20, {}, 1, 2)
    assert_whole(pool, ROWS)
    twice = {row for row, times in asked(stub).items() if times > 1}
    assert len(twice) <= 4 * capture.AWAITED  # those in flight
    assert twice <= outcome.suspects


def test_what_was_in_flight_comes_last_and_alone(stub: StubServer, pool: FeaturePool) -> None:
    server = Owned(stub)
    dying(server, when=lambda tokens, number: number == 9)
    outcome = capture.capture(ROWS, server, pool, features(), silent)
    order = [body["prompt"][0] - 100 for body in stub.asked("/v1/completions") if body["prompt"] != [1]]
    tail = order[-len(outcome.suspects) :]
    assert set(tail) == outcome.suspects
    ends = {row: order.index(row) for row in order}
    assert max(ends[row] for row in range(20) if row not in outcome.suspects) < len(order) - len(tail)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_row_that_kills_servers_is_found_alone_and_lost_by_name(
    stub: StubServer, pool: FeaturePool, concurrency: int
) -> None:
    server = Owned(stub)
    dying(server, when=lambda tokens, number: tokens[0] == 107)
    outcome = capture.capture(ROWS, server, pool, features(concurrency=concurrency), silent)
    assert list(outcome.lost) == [7]
    assert "died while it had this row alone" in outcome.lost[7]
    assert "status 137" in outcome.lost[7]
    assert outcome.captured == 19
    assert_whole(pool, [row for row in ROWS if row[0] != 7])
    assert asked(stub)[7] == 2
    assert outcome.restarts <= 2


def test_two_killers_are_both_found(stub: StubServer, pool: FeaturePool) -> None:
    server = Owned(stub)
    dying(server, when=lambda tokens, number: tokens[0] in (107, 108))
    outcome = capture.capture(ROWS, server, pool, features(max_server_restarts=4), silent)
    assert sorted(outcome.lost) == [7, 8]
    assert outcome.captured == 18


def test_a_file_that_was_never_written_because_the_server_died_is_nobodys_fault(
    stub: StubServer, pool: FeaturePool
) -> None:
    """The server answers 200 and dies before its writer has made the file: not the row's failed attempt."""
    server = Owned(stub)

    def decide(tokens: list[int], number: int) -> Capture:
        if number == 9:
            threading.Timer(0.1, server.die).start()
        return Capture(failed=number == 9)

    stub.on_capture(decide)
    held = stub.write

    def slow_failure(what: Capture, tokens: list[int], path: Path) -> None:
        held(Capture(write_delay_s=0.3, failed=True) if what.failed else what, tokens, path)

    stub.write = slow_failure  # type: ignore[method-assign]
    outcome = capture.capture(ROWS, server, pool, features(), silent)
    assert (outcome.captured, outcome.lost, outcome.restarts) == (20, {}, 1)


def test_a_dead_engine_behind_a_living_api_server_costs_no_attempt(stub: StubServer, pool: FeaturePool) -> None:
    """vLLM answers 500, its /health 503, and its process ends a moment later."""
    server = Owned(stub)
    stub.health = 200

    def decide(tokens: list[int], number: int) -> Capture:
        if number == 9:
            stub.health = 503
            threading.Timer(0.6, server.die).start()
        return Capture(status=200 if stub.health == 200 else 500)

    stub.on_capture(decide)
    entering = server.__call__

    @contextmanager
    def lend() -> Iterator[Lease]:
        stub.health = 200
        with entering() as lease:
            yield lease

    outcome = capture.capture(ROWS, lend, pool, features(), silent)
    assert (outcome.captured, outcome.lost, outcome.restarts) == (20, {}, 1)


def test_a_server_that_hangs_is_replaced(stub: StubServer, pool: FeaturePool) -> None:
    server = Owned(stub)
    stub.on_capture(lambda tokens, number: Capture(delay_s=60 if number >= 6 and server.lent == 1 else 0))
    outcome = capture.capture(ROWS, server, pool, features(request_timeout_s=1), silent)
    assert (outcome.captured, outcome.lost, outcome.restarts) == (20, {}, 1)
    assert_whole(pool, ROWS)


def test_one_slow_row_on_a_working_server_is_only_a_failed_attempt(stub: StubServer, pool: FeaturePool) -> None:
    server = Owned(stub)
    stub.on_capture(lambda tokens, number: Capture(delay_s=60 if tokens[0] == 103 else 0.2))
    outcome = capture.capture(ROWS, server, pool, features(request_timeout_s=0.7), silent)
    assert (list(outcome.lost), outcome.restarts) == ([3], 0)
    assert "timeout" in outcome.lost[3]


def test_restarts_end(stub: StubServer, pool: FeaturePool) -> None:
    server = Owned(stub)
    dying(server, when=lambda tokens, number: number in (9, 14))
    with pytest.raises(ServerError, match=r"status 137.*features.max_server_restarts 1 allows.*\d+ are left") as raised:
        capture.capture(ROWS, server, pool, features(max_server_restarts=1), silent)
    assert not raised.value.transient
    assert server.lent == 2
    kept = [row for row in ROWS if pool.find(row[1]) is not None]
    assert 1 <= len(kept) < 20  # what was captured before is there
    assert_whole(pool, kept)


def test_a_replacement_that_does_not_start_counts(stub: StubServer, pool: FeaturePool) -> None:
    server = Owned(stub)
    dying(server, when=lambda tokens, number: number == 9)
    refusals = [None, ServerError("log: out of memory"), None]

    @contextmanager
    def lend() -> Iterator[Lease]:
        if (refusal := refusals.pop(0)) is not None:
            raise refusal
        with server() as lease:
            yield lease

    outcome = capture.capture(ROWS, lend, pool, features(max_server_restarts=2), silent)
    assert (outcome.captured, outcome.restarts) == (20, 2)


def test_a_first_server_that_does_not_start_is_an_error_at_once(pool: FeaturePool) -> None:
    calls = []

    @contextmanager
    def lend() -> Iterator[Lease]:
        calls.append(1)
        raise ServerError("log: unknown flag")
        yield

    with pytest.raises(ServerError, match="unknown flag"):
        capture.capture(ROWS, lend, pool, features(), silent)
    assert len(calls) == 1


def named(*stubs: StubServer) -> Lease:
    """Endpoints that the user named; all write into the first one's storage."""
    for stub in stubs:
        stub.storage = stubs[0].storage
    first, *others = (Endpoint(stub.url, "stub") for stub in stubs)
    return Lease(first, stubs[0].storage, others=tuple(others))


def test_a_named_endpoint_that_comes_back_is_waited_for(stub: StubServer, pool: FeaturePool) -> None:
    seen: list[Progress] = []

    def decide(tokens: list[int], number: int) -> Capture:
        if number == 9:
            stub.away()
            threading.Timer(2.5, stub.back).start()
        return Capture(delay_s=0.02)

    stub.on_capture(decide)
    outcome = capture.capture(ROWS, lambda: nullcontext(named(stub)), pool, features(), seen.append)
    assert (outcome.captured, outcome.lost, outcome.restarts) == (20, {}, 0)
    assert_whole(pool, ROWS)
    assert any(progress.figures.get("waiting for") == stub.url for progress in seen)
    assert sum(times > 1 for times in asked(stub).values()) <= 4 * capture.AWAITED


def test_a_named_endpoint_that_stays_away_fails_the_shard_and_keeps_what_came(
    stub: StubServer, pool: FeaturePool
) -> None:
    def decide(tokens: list[int], number: int) -> Capture:
        if number == 9:
            stub.away()
        return Capture(delay_s=0.02)

    stub.on_capture(decide)
    lease = named(stub)
    with pytest.raises(TransientError, match=f"{stub.url}.*for 1 s"):
        capture.capture(ROWS, lambda: nullcontext(lease), pool, features(endpoint_patience_s=1), silent)
    assert sum(pool.find(tokens) is not None for _, tokens in ROWS) >= 5


def test_several_named_endpoints_share_the_rows_and_others_take_over(stub: StubServer, pool: FeaturePool) -> None:
    with StubServer() as other:
        flying: Counter[str] = Counter()
        peak: Counter[str] = Counter()

        def at(server: StubServer, name: str) -> None:
            send = server._extract

            async def extract(body: dict[str, Any]) -> Any:
                flying[name] += 1
                peak[name] = max(peak[name], flying[name])
                try:
                    return await send(body)
                finally:
                    flying[name] -= 1

            server._extract = extract  # type: ignore[method-assign]

        at(stub, "one")
        at(other, "two")
        stub.on_capture(lambda tokens, number: Capture(delay_s=0.05))
        other.on_capture(lambda tokens, number: Capture(delay_s=0.05))
        rows = [(i, [100 + i, 1, 2, 3]) for i in range(40)]
        lease = named(stub, other)
        both = capture.capture(rows[:20], lambda: nullcontext(lease), pool, features(concurrency=3), silent)
        assert both.captured == 20
        assert 5 <= sum(asked(other).values()) <= 15
        assert (peak["one"], peak["two"]) == (3, 3)
        stub.away()
        outcome = capture.capture(rows[20:], lambda: nullcontext(lease), pool, features(), silent)
        assert (outcome.captured, outcome.lost) == (20, {})
        assert_whole(pool, rows)


def test_a_row_that_fells_named_endpoints_is_lost_alone(stub: StubServer, pool: FeaturePool) -> None:
    def decide(tokens: list[int], number: int) -> Capture:
        if tokens[0] == 107:
            stub.away()
            threading.Timer(0.3, stub.back).start()
        return Capture(delay_s=0.02)

    stub.on_capture(decide)
    outcome = capture.capture(ROWS, lambda: nullcontext(named(stub)), pool, features(max_attempts=2), silent)
    assert list(outcome.lost) == [7]
    assert "went away 2 times while it had this row alone" in outcome.lost[7]
    assert outcome.captured == 19


def test_versions(stub: StubServer, pool: FeaturePool) -> None:
    def once() -> Outcome:
        pool_free = [(i, [300 + i, len(stub.requests)]) for i in range(2)]
        return capture.capture(pool_free, lambda: nullcontext(named(stub)), pool, features(), silent)

    assert once().vllm is None
    stub.version = "0.32.0"
    assert once().vllm == "0.32.0"


def test_another_model_is_refused_before_a_row_is_lost(stub: StubServer, pool: FeaturePool) -> None:
    lease = Lease(Endpoint(stub.url, "another"), stub.storage)
    with pytest.raises(ServerError, match="serves stub, not another"):
        capture.capture(ROWS, lambda: nullcontext(lease), pool, features(), silent)
    assert not asked(stub)
