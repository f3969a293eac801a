"""The figures beside the rows, worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.traces.summary import Summary, Tally, bucket, reason_class
from slipstream.traces.trace import MISMATCHED, REBUILT, SERVER, Trace


def trace(prompt: int = 4, output: int = 6, cut: bool = False, turn: int = 0, **more: Any) -> Trace:
    """A trace of so many tokens."""
    return Trace("k", (1,) * prompt, (2,) * output, "length" if cut else "stop", "hm", "4", turn, **more)


@pytest.mark.parametrize(
    ("tokens", "edge"),
    [
        *((tokens, tokens) for tokens in range(16)),
        (16, 16),
        (17, 16),
        (18, 18),
        (31, 30),
        (32, 32),
        (35, 32),
        (36, 36),
        (63, 60),
        (64, 64),
        (71, 64),
        (72, 72),
        (1000, 960),
        (1024, 1024),
        (1151, 1024),
        (1152, 1152),
        (131_072, 131_072),
    ],
)
def test_edges_of_the_bins(tokens: int, edge: int) -> None:
    assert bucket(tokens) == edge


def test_eight_bins_an_octave() -> None:
    assert [len({bucket(tokens) for tokens in range(low, 2 * low)}) for low in (16, 32, 1024, 4096)] == [8] * 4


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_bins_are_in_order_and_narrow(one: int, other: int) -> None:
    assert (bucket(one) <= bucket(other)) or one > other
    assert bucket(one) <= one <= bucket(one) * 9 / 8 + 1
    assert bucket(bucket(one)) == bucket(one)


@pytest.mark.parametrize(
    ("reason", "countable"),
    [("prompt_too_long: 99 tokens", "prompt_too_long"), ("truncated", "truncated"), ("HTTP 400: a: b", "HTTP 400")],
)
def test_reasons_are_counted_without_their_details(reason: str, countable: str) -> None:
    assert reason_class(reason) == countable


def test_figures_of_accepted_rows() -> None:
    tally = Tally()
    tally.add(trace(4, 6), 2, first=True)
    tally.add(trace(10, 10, turn=1), 8, first=False)
    assert tally.figures() == {
        "rows": 2,
        "conversations": 1,
        "rejected": 0,
        "truncated": 0,
        "with_thinking": 2,
        "prompt_tokens": 14,
        "output_tokens": 16,
        "thinking_tokens": 10,
        "mean_output_tokens": 8.0,
        "reasoning_share": 0.625,
    }


def test_no_rows_are_no_shares() -> None:
    figures = Summary().figures()
    assert figures["total"]["mean_output_tokens"] is None
    assert figures["total"]["reasoning_share"] is None
    assert (figures["truncated_share"], figures["mismatch_share"], figures["domains"]) == (0, 0, {})


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["math", "code", "chat"]),
        st.integers(0, 50),
        st.integers(1, 50),
        st.booleans(),
        st.sampled_from([None, "truncated", "HTTP 400: a"]),
    ),
    max_size=30,
)


@given(ROWS)
def test_the_domains_add_up_to_the_total(rows: list[tuple[str, int, int, bool, str | None]]) -> None:
    summary = Summary()
    for kind, prompt, output, cut, reason in rows:
        if reason is None:
            summary.accept(kind, trace(prompt, output, cut), 0, True)
        else:
            summary.reject(kind, reason)
    for name, total in summary.total.__dict__.items():
        assert sum(getattr(tally, name) for tally in summary.domains.values()) == total
    accepted = [row for row in rows if row[4] is None]
    assert summary.total.rows == len(accepted)
    assert summary.total.output_tokens == sum(row[2] for row in accepted)
    assert summary.total.rejected == sum(summary.reasons.values()) == len(rows) - len(accepted)
    assert sum(summary.prompt_lengths.values()) == sum(summary.output_lengths.values()) == len(accepted)
    assert summary.domains.keys() == {row[0] for row in rows}


def test_shares_are_of_answers_not_of_accepted_rows() -> None:
    summary = Summary()
    for cut, ids in ((True, SERVER), (False, SERVER), (False, REBUILT), (False, REBUILT), (True, MISMATCHED)):
        summary.answer(trace(cut=cut, ids=ids))
    assert summary.truncated_share == pytest.approx(2 / 5)
    assert summary.mismatch_share() == pytest.approx(1 / 3)


def test_servers_that_give_ids_have_no_mismatch() -> None:
    summary = Summary()
    summary.answer(trace())
    assert summary.mismatch_share() == 0


def test_the_summary_as_it_is_stored() -> None:
    summary = Summary()
    summary.answer(trace(40, 17))
    summary.accept("math", trace(40, 17), 3, True)
    summary.answer(trace(cut=True))
    summary.reject("code", "truncated")
    summary.reject("code", "prompt_too_long: 99 tokens")
    figures = json.loads(json.dumps(summary.figures(), allow_nan=False))
    assert list(figures["domains"]) == ["code", "math"]
    assert figures["domains"]["code"]["rejected"] == 2
    assert figures["domains"]["math"]["rows"] == figures["total"]["rows"] == 1
    assert figures["reasons"] == {"prompt_too_long": 1, "truncated": 1}
    assert (figures["answers"], figures["truncated_answers"], figures["truncated_share"]) == (2, 1, 0.5)
    assert figures["token_ids"] == {"server": 2}
    assert (figures["prompt_lengths"], figures["output_lengths"]) == ({"40": 1}, {"16": 1})


def test_lengths_are_stored_in_order_of_size() -> None:
    summary = Summary()
    for length in (1000, 9, 100):
        summary.accept("all", trace(length, length), 0, True)
    assert list(summary.figures()["prompt_lengths"]) == ["9", "96", "960"]
