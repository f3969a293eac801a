"""The pure part of the progress text: what is left, and how it is said."""

from __future__ import annotations

import pytest

from slipstream.progress import Progress
from tasks.progress import Pace, describe, duration, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (40.4, "40 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (89, "1 min"),
        (720, "12 min"),
        (3569, "59 min"),
        (3590, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (187_200, "52 h 00 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_line() -> None:
    progress = Progress(120, 400, "prompts", {"tokens/s": 820, "failed": 0})
    assert describe(progress) == "120 of 400 prompts, tokens/s 820, failed 0"
    assert describe(progress, 720) == "120 of 400 prompts, tokens/s 820, failed 0, ETA 12 min"


def left(reports: list[tuple[float, int]], total: int, now: float | None = None) -> float | None:
    """What is left after reports of (time, done)."""
    pace = Pace()
    for at, done in reports:
        pace.see(done, at)
    return pace.left_s(total, reports[-1][0] if now is None and reports else now or 0.0)


def test_unknown_until_something_was_done() -> None:
    assert left([], 10) is None
    assert left([(0, 1)], 10) is None
    assert left([(0, 1), (5, 1)], 10) is None


def test_the_pace_of_this_execution() -> None:
    assert left([(100, 0), (110, 20)], 100) == pytest.approx(40)  # 2 a second, 80 to go


def test_what_a_resumed_stage_found_done_cost_no_time() -> None:
    assert left([(100, 900), (160, 910)], 1000) == pytest.approx(540)  # 6 s each, 90 to go


def test_a_long_unit_counts_down_and_a_stalled_one_does_not_promise_its_end() -> None:
    epochs = [(0.0, 0), (3600.0, 1)]
    assert left(epochs, 3) == pytest.approx(7200)
    assert left([*epochs, (4600.0, 1)], 3) == pytest.approx(6200)
    assert left([*epochs, (9000.0, 1)], 3) == pytest.approx(3600)


def test_nothing_is_left_at_the_end() -> None:
    assert left([(0, 0), (9, 10)], 10) is None


def test_a_count_that_starts_again_starts_the_clock_again() -> None:
    assert left([(0, 0), (10, 50), (20, 0)], 100) is None
    assert left([(0, 0), (10, 50), (20, 0), (30, 10)], 100) == pytest.approx(90)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (246_256, "246.3 kB"), (1_400_000, "1.4 MB"), (828_047_360_000, "828.0 GB")],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text
