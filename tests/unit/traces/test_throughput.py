"""Tokens over time on a clock that only the tests move."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.traces import throughput
from slipstream.traces.throughput import BUCKETS, Throughput

START = 1000.0


class Clock:
    """The two clocks that the module reads."""

    def __init__(self) -> None:
        self.now, self.cpu = START, 0.0

    def at(self, seconds: float) -> None:
        """So long after the beginning."""
        self.now = START + seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A clock in place of the module's."""
    with pytest.MonkeyPatch.context() as patch:
        yield patched(patch)


def patched(patch: pytest.MonkeyPatch) -> Clock:
    """Puts a clock in place of the module's."""
    clock = Clock()
    fake = SimpleNamespace(monotonic=lambda: clock.now, thread_time=lambda: clock.cpu)
    patch.setattr(throughput, "time", fake)
    return clock


def counted(times: list[tuple[float, int]]) -> dict[str, Any]:
    """The figures after answers at these times."""
    with pytest.MonkeyPatch.context() as patch:
        clock = patched(patch)
        made = Throughput()
        for seconds, tokens in times:
            clock.at(seconds)
            made.add(tokens)
        return {"answers": made.answers, "tokens": made.tokens, **made.figures()}


def test_tokens_by_second() -> None:
    figures = counted([(0.0, 5), (0.5, 10), (2.0, 7), (2.75, 1)])
    assert (figures["bucket_s"], figures["tokens_per_s"]) == (1.0, [15.0, 0.0, 8.0])
    assert (figures["answers"], figures["tokens"]) == (4, 23)


def test_buckets_merge_in_pairs_when_there_are_too_many() -> None:
    figures = counted([(float(second), second + 1) for second in range(BUCKETS)] + [(float(BUCKETS), 1000)])
    assert figures["bucket_s"] == 2.0
    pairs = [(2 * i + 1 + 2 * i + 2) / 2 for i in range(BUCKETS // 2)]
    assert figures["tokens_per_s"] == [*pairs, 500.0]


def test_the_last_second_before_merging_is_kept_apart() -> None:
    figures = counted([(0.0, 8), (BUCKETS - 0.25, 4)])
    assert figures["bucket_s"] == 1.0
    assert figures["tokens_per_s"] == [8.0, *[0.0] * (BUCKETS - 2), 4.0]


def test_a_long_pause_merges_as_often_as_it_must() -> None:
    figures = counted([(0.0, 64), (10_000.0, 128)])
    assert figures["bucket_s"] == 64.0  # 10,000 / 32 is 312, 10,000 / 64 is 156
    assert figures["tokens_per_s"] == [1.0, *[0.0] * 155, 2.0]


TIMES = st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 4096)), min_size=1, max_size=50)


@given(TIMES)
def test_no_token_is_lost_and_each_lies_where_it_came(quarters: list[tuple[int, int]]) -> None:
    times = sorted((quarter / 4, tokens) for quarter, tokens in quarters)
    figures = counted(times)
    seconds, last = figures["bucket_s"], times[-1][0]
    assert last / seconds < BUCKETS
    assert seconds == 1 or last / seconds >= BUCKETS / 2  # not coarser than it must be
    expected: Counter[int] = Counter()
    for at, tokens in times:
        expected[int(at // seconds)] += tokens
    assert figures["tokens_per_s"] == [round(expected[i] / seconds, 1) for i in range(int(last // seconds) + 1)]
    assert figures["tokens"] == sum(tokens for _, tokens in times)


def test_seconds_since_the_beginning(clock: Clock) -> None:
    made = Throughput()
    clock.at(12.5)
    assert made.seconds == 12.5


def sampled(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, *moments: tuple[float, float], working: bool = True
) -> dict[str, Any]:
    """The figures after moments of so many seconds, of which so many were computed."""
    made = Throughput()
    left = iter(moments)

    async def sleep(_: float) -> None:
        seconds, computed = next(left, (0.0, 0.0))
        clock.now, clock.cpu = clock.now + seconds, clock.cpu + computed
        if clock.now == START + sum(seconds for seconds, _ in moments):
            raise asyncio.CancelledError

    monkeypatch.setattr(throughput, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(made.sample(lambda: working))  # ended in the last moment, which figures() looks at
    return made.figures()


def test_who_was_the_limit(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = sampled(clock, monkeypatch, (0.25, 0.0), (0.25, 0.125), (0.25, 0.25), (0.25, 0.25))
    assert figures["client_cpu_share"] == 0.625  # (0 + 0.5 + 1 + 1) / 4
    assert figures["server_limited_share"] == 0.5


def test_a_short_run_is_sampled_as_well(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = sampled(clock, monkeypatch, (0.1, 0.05))
    assert figures["client_cpu_share"] == 0.5
    assert figures["server_limited_share"] == 1.0


def test_shares_are_of_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = sampled(clock, monkeypatch, (9.0, 9.0), (0.25, 0.0), (0.25, 0.0), (0.25, 0.0), (0.25, 0.0))
    assert figures["client_cpu_share"] == 0.9
    assert figures["server_limited_share"] == 0.1
