"""Which traces are trained on: every reason, which one wins, and what the policy may switch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from slipstream.chat import to_answer
from slipstream.config import RunConfig
from slipstream.traces.rules import Rules
from slipstream.traces.trace import MISMATCHED, REBUILT, Trace

OPEN, CLOSE, END, OTHER_END = 7, 8, 9, 10
RULES = Rules(OPEN, CLOSE, (END, OTHER_END))
CALL = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
NO_THINKING = {"chat_template_kwargs": {"thinking": False}}


def trace(*output: int, cut: bool = False, **more: Any) -> Trace:
    """A trace with this output after the prompt 1, 2, 3; texts as a thinking verifier returns them."""
    texts = {"thinking": "hm", "answer": "4"}
    return Trace("k", (1, 2, 3), output, "length" if cut else "stop", **texts | more)


GOOD = trace(5, CLOSE, 6, END)


@pytest.mark.parametrize(
    "made",
    [
        GOOD,
        trace(5, CLOSE, 6, OTHER_END),
        trace(5, CLOSE, 6),
        trace(OPEN, 5, CLOSE, 6, END),
        trace(5, CLOSE, 6, END, ids=REBUILT),
        trace(5, CLOSE, 6, cut=True),
        trace(5, CLOSE, cut=True, answer=None),
        trace(5, 6, cut=True, answer=None),
        trace(5, CLOSE, END, answer=None, tool_calls=(CALL,)),
    ],
    ids=[
        "complete",
        "another end token",
        "no end token: a stop string",
        "opens its thinking itself",
        "rebuilt",
        "cut in the answer",
        "cut right after the thinking",
        "cut in the thinking",
        "a call and no text",
    ],
)
def test_what_may_be_trained_on(made: Trace) -> None:
    assert RULES.rejection(made) is None


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (trace(5, CLOSE, 6, END, ids=MISMATCHED), "token_mismatch"),
        (trace(), "empty_output"),
        (trace(cut=True), "empty_output"),
        (trace(5, CLOSE, END, cut=True), "end_token_after_cut"),
        (trace(5, OTHER_END, cut=True), "end_token_after_cut"),
        (trace(5, 6, END), "no_reasoning"),
        (trace(CLOSE, 6, END, thinking=None), "no_reasoning"),
        (trace(5, CLOSE, 6, END, thinking=" \n"), "no_reasoning"),
        (trace(5, CLOSE, 6, CLOSE, END), "leaked_thinking"),
        (trace(5, CLOSE, OPEN, 6, END), "leaked_thinking"),
        (trace(5, CLOSE, OPEN, 6, cut=True), "leaked_thinking"),
        (trace(5, CLOSE, 6, END, answer="<think>4"), "leaked_thinking"),
        (trace(5, CLOSE, 6, END, answer="4</think>"), "leaked_thinking"),
        (trace(5, CLOSE, END), "empty_answer"),
        (trace(5, CLOSE), "empty_answer"),
        (trace(5, CLOSE, END, OTHER_END), "empty_answer"),
    ],
)
def test_reasons(made: Trace, reason: str) -> None:
    assert RULES.rejection(made) == reason


@pytest.mark.parametrize("made", [trace(5, CLOSE, 6, cut=True), trace(5, 6, cut=True, answer=None)])
def test_cut_traces_go_when_the_policy_says_so(made: Trace) -> None:
    assert RULES.rejection(made) is None
    assert replace(RULES, keep_truncated=False).rejection(made) == "truncated"


STRICT = replace(RULES, keep_truncated=False, max_supervised_share=0.01)


@pytest.mark.parametrize(
    ("rules", "made", "reason"),
    [
        (STRICT, trace(ids=MISMATCHED, cut=True), "token_mismatch"),
        (STRICT, trace(cut=True), "empty_output"),
        (STRICT, trace(5, END, cut=True), "truncated"),
        (RULES, trace(5, CLOSE, OPEN, END, cut=True), "end_token_after_cut"),
        (STRICT, trace(5, OPEN, END, answer="<think>"), "no_reasoning"),
        (STRICT, trace(5, CLOSE, END, answer="</think>"), "leaked_thinking"),
        (STRICT, trace(5, CLOSE, END), "empty_answer"),
        (STRICT, trace(5, CLOSE, 6, END), "supervised_share"),
    ],
)
def test_the_first_reason_is_told(rules: Rules, made: Trace, reason: str) -> None:
    assert rules.rejection(made) == reason


def test_a_run_without_reasoning_wants_none() -> None:
    plain = trace(5, 6, END, thinking=None)
    assert RULES.rejection(plain) == "no_reasoning"
    assert replace(RULES, reasoning=False).rejection(plain) is None


def test_a_prompt_asked_without_thinking_needs_none() -> None:
    plain = trace(5, 6, END, thinking=None, sampling=NO_THINKING)
    assert RULES.rejection(plain) is None
    assert not RULES.wants_thinking(plain)
    assert RULES.wants_thinking(trace(5, sampling={"chat_template_kwargs": {"thinking": True}}))
    assert RULES.wants_thinking(trace(5, sampling={"temperature": 0.6}))


def test_an_answer_without_thinking_is_still_checked() -> None:
    assert RULES.rejection(trace(5, OPEN, 6, END, thinking=None, sampling=NO_THINKING)) == "leaked_thinking"
    assert RULES.rejection(trace(END, thinking=None, answer=None, sampling=NO_THINKING)) == "empty_answer"


def test_a_verifier_without_think_tokens() -> None:
    rules = Rules(None, None, (END,), reasoning=False)
    assert rules.rejection(trace(OPEN, CLOSE, 6, END, thinking=None)) is None
    assert rules.rejection(trace(END, thinking=None)) == "empty_answer"


@pytest.mark.parametrize(
    ("low", "high", "reason"),
    [
        (0.0, 1.0, None),
        (0.4, 0.4, None),
        (0.41, 1.0, "supervised_share"),
        (0.0, 0.39, "supervised_share"),
    ],
)
def test_bounds_of_the_supervised_share_belong_to_it(low: float, high: float, reason: str | None) -> None:
    made = replace(GOOD, prompt_ids=(1,) * 6)  # 4 of 10 tokens
    assert replace(RULES, min_supervised_share=low, max_supervised_share=high).rejection(made) == reason


def test_ten_answers_of_which_three_used_their_budget_up_thinking() -> None:
    """Field report 5: content null, reasoning "half", finish_reason length."""
    cut = {"message": {"content": None, "reasoning": "half"}, "finish_reason": "length", "token_ids": [5, 6]}
    whole = {"message": {"content": "4", "reasoning": "hm"}, "finish_reason": "stop", "token_ids": [5, CLOSE, 6, END]}
    answers = [to_answer({"prompt_token_ids": [1, 2, 3], "choices": [choice]}) for choice in [cut] * 3 + [whole] * 7]
    traces = [Trace.of(a, f"k{i}", 0, {}, a.prompt_ids or (), a.output_ids or ()) for i, a in enumerate(answers)]
    dropped = [replace(RULES, keep_truncated=False).rejection(made) for made in traces]
    assert dropped == ["truncated"] * 3 + [None] * 7
    kept = [made for made in traces if RULES.rejection(made) is None]
    assert len(kept) == 10
    for made in kept[:3]:
        supervised = [token for token, mask in zip(made.input_ids, made.loss_mask(), strict=True) if mask]
        assert supervised == [5, 6]  # open: neither </think> nor an end token


def test_the_rules_of_a_run(make_config: Callable[..., RunConfig]) -> None:
    policy = {"reasoning": False, "keep_truncated": False, "min_supervised_share": 0.1, "max_supervised_share": 0.8}
    rules = Rules.of(make_config(traces=policy))
    assert rules == Rules(504, 505, (490,), False, False, 0.1, 0.8)


@pytest.mark.parametrize(
    ("output", "finish_reason", "sampling", "thinking"),
    [
        ((5, 6, CLOSE, 7, END), "stop", {}, 2),
        ((5, 6), "length", {}, 2),
        ((5, 6, CLOSE, 7), "length", {}, 2),
        ((5, 6), "length", {"chat_template_kwargs": {"thinking": False}}, 0),
        ((5, END), "stop", {}, 0),
    ],
)
def test_tokens_of_thinking(
    output: tuple[int, ...], finish_reason: str, sampling: dict[str, Any], thinking: int
) -> None:
    trace = Trace("k", (1,), output, finish_reason, "t", "a", sampling=sampling)
    rules = Rules(think_open=OPEN, think_close=CLOSE, eos_ids=(END,))
    assert rules.thinking_tokens(trace) == thinking


def test_thinking_where_none_was_asked_leaks() -> None:
    trace = Trace(
        "k", (1,), (5, CLOSE, 7, END), "stop", None, "a", sampling={"chat_template_kwargs": {"thinking": False}}
    )
    assert Rules(think_open=OPEN, think_close=CLOSE, eos_ids=(END,)).rejection(trace) == "leaked_thinking"


@pytest.mark.parametrize("reason", ["content_filter", "None", "function_call"])
def test_an_answer_that_did_not_finish_is_named(reason: str) -> None:
    assert RULES.rejection(replace(GOOD, finish_reason=reason)) == f"unfinished: finish_reason {reason}"
