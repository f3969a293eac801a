"""The window of requests in flight, on a clock that only the tests move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.traces.window import CALM_S, PATIENCE, Window

TOKENS = 10  # of every answer here


class Clock:
    """Time that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def windowful(window: Window, clock: Clock, tokens_per_s: float, in_flight: int | None = None) -> int:
    """One window of answers at this throughput, all slots in use unless told; returns the limit after it."""
    answers = window.limit
    window.used(answers if in_flight is None else in_flight)
    clock.now += answers * TOKENS / tokens_per_s
    for _ in range(answers):
        window.answered(TOKENS)
    return window.limit


def started(maximum: int = 10_000, limit: int = 16) -> tuple[Window, Clock]:
    """A window of so many requests before its first answer, and its clock."""
    clock = Clock()
    window = Window(maximum, clock)
    window.limit = min(maximum, limit)
    return window, clock


@pytest.mark.parametrize(("maximum", "limit"), [(1, 1), (5, 5), (64, 64), (80, 64), (128, 64), (512, 256), (513, 256)])
def test_it_starts_at_half_the_maximum_but_not_below_sixty_four(maximum: int, limit: int) -> None:
    assert Window(maximum).limit == limit


def test_it_doubles_while_throughput_grows() -> None:
    window, clock = started()
    assert [windowful(window, clock, rate) for rate in (100, 200, 400, 800)] == [32, 64, 128, 256]


def test_it_stops_where_a_larger_window_brings_no_more() -> None:
    window, clock = started()
    server = 1280  # tokens a second at most: 128 requests in flight use it up
    grown = [windowful(window, clock, min(server, window.limit * TOKENS)) for _ in range(8)]
    assert grown == [32, 64, 128, 256, 128, 128, 128, 128]  # 256 brought nothing and is given up


def test_it_wants_five_percent_more() -> None:
    window, clock = started()
    windowful(window, clock, 1000)
    assert windowful(window, clock, 1040) == 16
    assert windowful(window, clock, 1060) == 32


def test_no_judgement_before_a_window_of_answers() -> None:
    window, clock = started()
    window.used(16)
    clock.now += 1
    for _ in range(15):
        window.answered(TOKENS)
    assert window.limit == 16
    window.answered(TOKENS)
    assert window.limit == 32


def test_the_rate_counts_tokens_not_answers() -> None:
    window, clock = started()
    windowful(window, clock, 100)
    window.used(32)
    clock.now += 32 * TOKENS / 100  # as many answers a second as before, three times as long
    for _ in range(32):
        window.answered(3 * TOKENS)
    assert window.limit == 64


def test_after_patience_flat_windows_a_larger_one_is_tried() -> None:
    window, clock = started()
    assert [windowful(window, clock, 100) for _ in range(2)] == [32, 16]
    assert [windowful(window, clock, 100) for _ in range(PATIENCE)] == [16] * (PATIENCE - 1) + [32]
    assert windowful(window, clock, 100) == 16


def test_after_the_retry_growth_is_measured_against_today() -> None:
    window, clock = started()
    windowful(window, clock, 1000)
    for _ in range(PATIENCE + 1):
        windowful(window, clock, 100)  # the load has changed: 1000 is no longer to be had
    assert window.limit == 32
    assert windowful(window, clock, 200) == 64


def test_a_larger_window_that_hurts_is_given_up_at_the_maximum_as_well() -> None:
    window, clock = started(512, limit=256)
    assert [windowful(window, clock, rate) for rate in (1000, 500, 1000)] == [512, 256, 256]


def test_free_slots_say_nothing_about_a_larger_window() -> None:
    window, clock = started()
    assert [windowful(window, clock, rate, in_flight=15) for rate in (100, 1000, 10_000)] == [16] * 3
    assert windowful(window, clock, 100) == 32  # and left no best rate behind


def test_full_once_is_full_for_that_window_only() -> None:
    window, clock = started()
    window.used(16)
    assert windowful(window, clock, 100, in_flight=3) == 32
    assert windowful(window, clock, 1000, in_flight=3) == 32


def test_it_never_passes_the_maximum() -> None:
    window, clock = started(50)
    assert [windowful(window, clock, 100 * 2**i) for i in range(4)] == [32, 50, 50, 50]


def test_a_refusal_halves_it() -> None:
    window, clock = started()
    windowful(window, clock, 100)
    window.refused(window.limit)
    assert (window.limit, window.backoffs) == (16, 1)


def test_a_refusal_counts_what_was_in_flight() -> None:
    window, _ = started(limit=64)
    window.refused(8)
    assert window.limit == 4


def test_refusals_of_one_moment_are_one_backoff() -> None:
    window, clock = started()
    for after in (0, 0.25, 0.5):
        window.refused(window.limit)
        clock.now += after
    assert (window.limit, window.backoffs) == (8, 1)
    clock.now += CALM_S
    window.refused(window.limit)
    assert (window.limit, window.backoffs) == (4, 2)


def test_a_server_that_refuses_for_ever_still_gets_one_request() -> None:
    window, clock = started()
    limits = []
    for _ in range(6):
        window.refused(window.limit)
        limits.append(window.limit)
        clock.now += CALM_S
    assert limits == [8, 4, 2, 1, 1, 1]


def test_after_a_refusal_it_grows_by_an_eighth() -> None:
    window, clock = started()
    for rate in (100, 200, 400):
        windowful(window, clock, rate)
    window.refused(window.limit)
    assert window.limit == 64
    assert [windowful(window, clock, rate) for rate in (500, 600, 700)] == [72, 81, 91]  # + 64/8, 72/8, 81/8


def test_a_refusal_forgets_what_the_server_once_gave() -> None:
    window, clock = started()
    windowful(window, clock, 1000)
    window.refused(window.limit)
    assert [windowful(window, clock, rate) for rate in (100, 120)] == [18, 20]  # + 16/8, 18/8


def test_after_a_refusal_a_small_window_grows_by_one() -> None:
    window, clock = started(4, limit=4)
    window.refused(window.limit)
    assert [windowful(window, clock, rate) for rate in (100, 200, 400)] == [3, 4, 4]


def test_answers_before_a_refusal_do_not_count_after_it() -> None:
    window, clock = started()
    window.used(16)
    for _ in range(15):
        window.answered(TOKENS)
    window.refused(window.limit)
    for _ in range(7):
        window.answered(TOKENS)
    clock.now += 1
    window.answered(TOKENS)  # the eighth: a window of eight, but no request was sent in it
    assert window.limit == 8


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("used"), st.integers(1, 300)),
        st.tuples(st.just("answered"), st.integers(0, 5000)),
        st.tuples(st.just("refused"), st.integers(1, 300)),
        st.tuples(st.just("wait"), st.integers(0, 3)),
        st.tuples(st.just("windowful"), st.integers(1, 10_000)),
    ),
    max_size=60,
)


@given(st.integers(1, 200), OPERATIONS)
def test_it_never_leaves_one_to_maximum(maximum: int, operations: list[tuple[str, int]]) -> None:
    clock = Clock()
    window = Window(maximum, clock)
    backoffs, calm_until = 0, 0.0
    for name, value in operations:
        before = window.limit
        if name == "used":
            window.used(value)
        elif name == "answered":
            window.answered(value)
        elif name == "windowful":
            windowful(window, clock, value)
        elif name == "wait":
            clock.now += value / 2
        else:
            window.refused(value)
            if clock.now >= calm_until:
                backoffs, calm_until = backoffs + 1, clock.now + CALM_S
                assert window.limit == max(1, min(before, value) // 2)
        assert 1 <= window.limit <= maximum
        assert window.limit <= before * 2
        assert window.limit >= before or name in ("refused", "answered", "windowful")
    assert window.backoffs == backoffs
