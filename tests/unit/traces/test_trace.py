"""One trace: ids, mask, boundary, share, and the record that is stored."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.chat import Answer, to_answer
from slipstream.traces.trace import MISMATCHED, REBUILT, SERVER, Trace

CLOSE, END = 8, 9


def trace(output: tuple[int, ...], finish_reason: str = "stop", **more: Any) -> Trace:
    """A trace with this output after the prompt 1, 2, 3."""
    return Trace("k", (1, 2, 3), output, finish_reason, **{"thinking": None, "answer": None} | more)


def test_the_mask_marks_generated_tokens_unshifted() -> None:
    """Field report 16."""
    made = trace((10, 11, 2))
    assert made.input_ids == [1, 2, 3, 10, 11, 2]
    assert made.loss_mask() == [0, 0, 0, 1, 1, 1]


@given(st.lists(st.integers(0, 99)), st.lists(st.integers(0, 99)))
def test_under_the_mask_lies_the_output_and_nothing_else(prompt: list[int], output: list[int]) -> None:
    made = Trace("k", tuple(prompt), tuple(output), "stop", None, None)
    pairs = list(zip(made.input_ids, made.loss_mask(), strict=True))
    assert [token for token, mask in pairs if mask] == output
    assert [token for token, mask in pairs if not mask] == prompt


def test_the_boundary_is_the_first_closing_token() -> None:
    assert trace((5, CLOSE, 6, CLOSE, END)).boundary(CLOSE) == 1
    assert trace((CLOSE, END)).boundary(CLOSE) == 0
    assert trace((5, 6)).boundary(CLOSE) is None
    assert trace((5, CLOSE)).boundary(None) is None


def test_a_closing_token_in_the_prompt_is_no_boundary() -> None:
    assert Trace("k", (1, CLOSE), (5, 6), "stop", None, None).boundary(CLOSE) is None


@pytest.mark.parametrize(("finish_reason", "truncated"), [("length", True), ("stop", False), ("tool_calls", False)])
def test_the_token_limit_truncates(finish_reason: str, truncated: bool) -> None:
    assert trace((5,), finish_reason).truncated is truncated


def test_an_open_think_span_keeps_its_tokens_and_gets_no_end() -> None:
    """Field report 5: content null, reasoning cut by the limit."""
    made = trace((5, 6), "length", thinking="half")
    assert made.input_ids[3:] == [5, 6]
    assert made.loss_mask()[3:] == [1, 1]


def test_the_supervised_share() -> None:
    assert trace((5,)).supervised_share == 0.25
    assert trace(()).supervised_share == 0
    assert Trace("k", (), (), "stop", None, None).supervised_share == 0


def test_a_servers_answer_as_a_trace() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
    answer = Answer((1, 2), (3, 4), "tool_calls", "hm", None, (call,), (2, 2))
    made = Trace.of(answer, "key", 3, {"max_tokens": 7}, (1, 2), (3, 4), REBUILT)
    assert made == Trace("key", (1, 2), (3, 4), "tool_calls", "hm", None, 3, (call,), {"max_tokens": 7}, REBUILT)


def test_ids_are_the_servers_unless_told() -> None:
    message = {"content": "4", "reasoning": "2+2"}
    completion = {
        "prompt_token_ids": [1, 2],
        "choices": [{"message": message, "finish_reason": "stop", "token_ids": [4, 6]}],
    }
    answer = to_answer(completion)
    made = Trace.of(answer, "k", 0, {}, answer.prompt_ids or (), answer.output_ids or ())
    assert (made.ids, made.prompt_ids, made.output_ids) == (SERVER, (1, 2), (4, 6))
    assert (made.thinking, made.answer, made.truncated) == ("2+2", "4", False)


def test_the_stored_record_is_ascii_and_comes_back() -> None:
    made = trace((5, CLOSE, END), thinking="ü \ud83d", answer=None)
    assert made.to_record()[2].isascii()
    assert Trace.from_record(*made.to_record()) == made


TEXT = st.none() | st.text(st.characters(codec=None))
CALLS = st.lists(st.fixed_dictionaries({"id": st.text(), "function": st.dictionaries(st.text(), st.text())}))
IDS = st.lists(st.integers(0, 2**31 - 1)).map(tuple)


@given(
    st.builds(
        Trace,
        key=st.text(),
        prompt_ids=IDS,
        output_ids=IDS,
        finish_reason=st.sampled_from(["stop", "length", "tool_calls"]),
        thinking=TEXT,
        answer=TEXT,
        turn=st.integers(0, 9),
        tool_calls=CALLS.map(tuple),
        sampling=st.dictionaries(st.text(), st.integers() | st.booleans()),
        ids=st.sampled_from([SERVER, REBUILT, MISMATCHED]),
    )
)
def test_every_trace_comes_back_from_its_record(made: Trace) -> None:
    again = Trace.from_record(*made.to_record())
    assert again == made
    assert (type(again.prompt_ids), type(again.output_ids), type(again.tool_calls)) == (tuple, tuple, tuple)
