"""One trace: mask, boundary, reasons against training on it."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.traces.trace import Trace, rejection

CLOSE, END = 8, 9


def trace(output: tuple[int, ...], finish_reason: str = "stop", **more: Any) -> Trace:
    """A trace with this output after the prompt 1, 2, 3."""
    return Trace("k", (1, 2, 3), output, finish_reason, more.get("thinking"), more.get("answer"))


def test_the_mask_marks_generated_tokens_unshifted() -> None:
    made = trace((10, 11, 2))
    assert made.input_ids == [1, 2, 3, 10, 11, 2]
    assert made.loss_mask() == [0, 0, 0, 1, 1, 1]


def test_the_boundary_is_the_first_closing_token() -> None:
    assert trace((5, CLOSE, 6, CLOSE, END)).boundary(CLOSE) == 1
    assert trace((5, 6)).boundary(CLOSE) is None
    assert trace((5, CLOSE)).boundary(None) is None


@pytest.mark.parametrize(
    ("output", "finish_reason", "reasoning", "keep_truncated", "reason"),
    [
        ((5, CLOSE, 6, END), "stop", True, True, None),
        ((), "stop", True, True, "empty_output"),
        ((), "length", True, True, "empty_output"),
        ((5, 6, END), "stop", True, True, "no_reasoning"),
        ((5, 6, END), "stop", False, True, None),
        ((5, 6), "length", True, True, None),
        ((5, 6), "length", True, False, "truncated"),
        ((5, CLOSE, 6), "length", True, False, "truncated"),
        ((5, CLOSE, END), "length", True, True, "end_token_after_cut"),
    ],
)
def test_rejection(
    output: tuple[int, ...], finish_reason: str, reasoning: bool, keep_truncated: bool, reason: str | None
) -> None:
    made = trace(output, finish_reason)
    assert rejection(made, CLOSE, reasoning, keep_truncated, (END,)) == reason


def test_an_open_think_span_keeps_its_tokens_and_gets_no_end() -> None:
    made = trace((5, 6), "length", thinking="half")
    assert rejection(made, CLOSE, True, True, (END,)) is None
    assert made.input_ids[3:] == [5, 6]
    assert made.loss_mask()[3:] == [1, 1]


def test_the_stored_record_is_ascii_and_comes_back() -> None:
    made = trace((5, CLOSE, END), thinking="ü \ud83d", answer=None)
    assert made.to_json().isascii()
    assert Trace.from_json(made.to_json()) == made
