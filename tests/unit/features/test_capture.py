"""Capturing against a stub: pairing, repetition, what is lost and why, what is never read."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save
from stub_server import Capture, StubServer, states_of

from slipstream.config import FeaturesConfig
from slipstream.features import capture, extraction
from slipstream.features.capture import Outcome
from slipstream.features.lease import Lease
from slipstream.features.pool import FeaturePool
from slipstream.progress import Progress, silent
from slipstream.serving import Endpoint

Rows = Sequence[tuple[int, Sequence[int]]]
Run = Callable[..., Outcome]


@pytest.fixture
def run(stub: StubServer, pool: FeaturePool, no_backoff: None) -> Run:
    """Captures rows through the stub, without pauses between attempts."""

    def go(rows: Rows, report: Callable[[Progress], None] = silent, **more: Any) -> Outcome:
        lease = Lease(Endpoint(stub.url, "stub"), stub.storage)
        return capture.capture(rows, lambda: nullcontext(lease), pool, features(**more), report)

    return go


def features(**more: Any) -> FeaturesConfig:
    """Settings of a quick test; no reserve, for the machine's disk is its own affair."""
    given: dict[str, Any] = {"layer_ids": [1, 2, 3], "concurrency": 8, "request_timeout_s": 5, "max_attempts": 1}
    return FeaturesConfig(**given | {"disk_reserve_gib": 0} | more)


def numbered(count: int) -> Rows:
    """Rows of different lengths and tokens."""
    return [(i, [100 + i, *range(i % 5 + 1)]) for i in range(count)]


def stored(pool: FeaturePool, tokens: Sequence[int]) -> np.ndarray | None:
    """The states that the pool has for these tokens."""
    from slipstream.digest import digest_tokens

    path = pool.path(digest_tokens(tokens))
    return load_file(path)["hidden_states"] if path.exists() else None


def answers(stub: StubServer) -> list[dict[str, Any]]:
    """The bodies of the capture requests."""
    return stub.asked("/v1/completions")


@pytest.mark.parametrize("count", [12, 40])
def test_samples_pair_by_tokens_whatever_the_order(stub: StubServer, pool: FeaturePool, run: Run, count: int) -> None:
    lot = random.Random(count)
    stub.on_capture(lambda tokens, number: Capture(delay_s=lot.uniform(0, 0.03), write_delay_s=lot.uniform(0, 0.03)))
    rows = numbered(count)
    outcome = run(rows)
    assert (outcome.captured, outcome.lost) == (count, {})
    assert outcome.tokens == sum(len(tokens) for _, tokens in rows)
    for _, tokens in rows:
        states = stored(pool, tokens)
        assert states is not None
        assert np.array_equal(states, states_of(tokens, 4, 8))


def test_the_request_is_one_prefill_of_the_trace(stub: StubServer, run: Run) -> None:
    run([(0, [5, 6, 7])])
    (body,) = answers(stub)
    assert body.pop("request_id").startswith(f"slipstream-{extraction.process_name()}-")
    assert body == {"model": "stub", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}


def test_nothing_is_left_in_the_storage_folder(stub: StubServer, run: Run) -> None:
    run(numbered(12))
    assert list(stub.storage.iterdir()) == []


def test_an_answer_without_a_file_is_an_error(stub: StubServer, run: Run) -> None:
    stub.on_capture(lambda tokens, number: Capture(named="", write=False))
    outcome = run([(4, [5, 6])], max_attempts=3)
    assert outcome.captured == 0
    assert "not an extraction server" in outcome.lost[4]
    assert len(answers(stub)) == 1


@pytest.mark.parametrize("how", ["absolute", "dots", "link", "prefix"])
def test_a_path_outside_the_storage_folder_is_not_touched(
    stub: StubServer, pool: FeaturePool, run: Run, tmp_path: Path, how: str
) -> None:
    outside = tmp_path / "private.safetensors"
    if how == "prefix":
        outside = Path(f"{stub.storage}-private.safetensors")
    content = save({"hidden_states": states_of([5, 6], 4, 8), "token_ids": np.array([5, 6])})
    outside.write_bytes(content)
    (stub.storage / "link.safetensors").symlink_to(outside)
    named = {
        "absolute": str(outside),
        "prefix": str(outside),
        "dots": os.path.join(stub.storage, os.path.relpath(outside, stub.storage)),  # noqa: PTH118
        "link": str(stub.storage / "link.safetensors"),
    }
    stub.on_capture(lambda tokens, number: Capture(named=named[how], write=False))
    try:
        outcome = run([(0, [5, 6])])
        assert "outside its storage folder" in outcome.lost[0]
        assert outside.read_bytes() == content
        assert stored(pool, [5, 6]) is None
    finally:
        outside.unlink()


def wrong_tokens(tokens: list[int]) -> Capture:
    return Capture(tokens=tokens[::-1])


def short_states(tokens: list[int]) -> Capture:
    return Capture(states=states_of(tokens[1:], 4, 8))


def not_finite(tokens: list[int]) -> Capture:
    states = states_of(tokens, 4, 8)
    states[1, 2, 3] = np.nan
    return Capture(states=states)


BAD = [(wrong_tokens, "other tokens"), (short_states, "shape"), (not_finite, "layer position 2")]


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_bad_sample_is_tried_again_then_listed(
    stub: StubServer, pool: FeaturePool, run: Run, bad: Callable[[list[int]], Capture], reason: str
) -> None:
    stub.on_capture(lambda tokens, number: bad(tokens) if 66 in tokens else Capture())
    rows = [(0, [5, 6, 7]), (1, [66, 6, 7]), (2, [8, 6, 7])]
    outcome = run(rows, max_attempts=2)
    assert outcome.captured == 2
    assert list(outcome.lost) == [1]
    assert reason in outcome.lost[1]
    assert sum(66 in body["prompt"] for body in answers(stub)) == 2
    assert stored(pool, [66, 6, 7]) is None
    assert list(stub.storage.iterdir()) == []


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_sample_that_is_good_at_the_second_attempt_is_kept(
    stub: StubServer, pool: FeaturePool, run: Run, bad: Callable[[list[int]], Capture], reason: str
) -> None:
    stub.on_capture(lambda tokens, number: Capture() if number else bad(tokens))
    assert run([(0, [5, 6, 7])], max_attempts=2).captured == 1
    states = stored(pool, [5, 6, 7])
    assert states is not None
    assert np.array_equal(states, states_of([5, 6, 7], 4, 8))


@pytest.mark.parametrize(("status", "hits"), [(500, 3), (502, 3), (408, 3), (400, 1), (404, 1)])
def test_only_transient_statuses_are_tried_again(stub: StubServer, run: Run, status: int, hits: int) -> None:
    stub.on_capture(lambda tokens, number: Capture(status=status))
    outcome = run([(0, [5, 6])], max_attempts=3)
    assert f"HTTP {status}" in outcome.lost[0]
    assert len(answers(stub)) == hits


def test_a_file_that_never_comes_is_given_up(stub: StubServer, run: Run) -> None:
    stub.on_capture(lambda tokens, number: Capture(write=False))
    outcome = run([(7, [5, 6])], request_timeout_s=0.3)
    assert "wrote no file" in outcome.lost[7]


def test_an_idle_engine_is_flushed_and_its_own_file_removed(stub: StubServer, pool: FeaturePool, run: Run) -> None:
    """The first file appears only when another request comes; what that one writes is nobody's."""
    held: list[tuple[list[int], Path]] = []

    def decide(tokens: list[int], number: int) -> Capture:
        if number == 0:
            held.append((tokens, stub.paths[0]))
            return Capture(write=False)
        for waiting, where in held:
            stub.write(Capture(), waiting, where)
        held.clear()
        return Capture()

    stub.on_capture(decide)
    assert run([(0, [5, 6])]).captured == 1
    assert next(body["prompt"] for body in answers(stub)) == [5, 6]
    assert len(answers(stub)) > 1
    assert list(stub.storage.iterdir()) == []


def test_a_file_under_its_lock_is_not_read(stub: StubServer, pool: FeaturePool, run: Run) -> None:
    """The server has made the file but still writes it: half of it must not be taken."""

    def decide(tokens: list[int], number: int) -> Capture:
        stub.paths[number].write_bytes(b"half")
        return Capture(write_delay_s=0.2)

    stub.on_capture(decide)
    assert run([(0, [5, 6])]).lost == {}
    assert stored(pool, [5, 6]) is not None


@pytest.mark.parametrize(
    "raw",
    [
        ("text/html", b"<p>proxy</p>"),
        ("application/json", b"{"),
        ("application/json", b"[]"),
        ("application/json", b'{"kv_transfer_params": {"hidden_states_path": 7}}'),
    ],
)
def test_an_answer_that_is_no_completion_loses_its_row_only(stub: StubServer, run: Run, raw: tuple[str, bytes]) -> None:
    stub.on_capture(lambda tokens, number: Capture(raw=raw) if 66 in tokens else Capture())
    outcome = run([(0, [5, 6]), (1, [66, 6]), (2, [7, 6])])
    assert (outcome.captured, list(outcome.lost)) == (2, [1])


def test_a_path_that_names_the_folder_itself_loses_its_row_only(stub: StubServer, run: Run) -> None:
    stub.on_capture(lambda tokens, number: Capture(named=str(stub.storage), write=False) if 66 in tokens else Capture())
    outcome = run([(0, [5, 6]), (1, [66, 6])])
    assert (outcome.captured, list(outcome.lost)) == (1, [1])
    assert stub.storage.is_dir()


def test_progress_counts_stored_and_lost(stub: StubServer, run: Run) -> None:
    stub.on_capture(lambda tokens, number: Capture(status=400) if 102 in tokens else Capture())
    seen: list[Progress] = []
    run(numbered(5), seen.append)
    assert [(p.done, p.total) for p in seen] == [(i, 5) for i in range(1, 6)]
    assert seen[-1].figures["lost"] == 1
