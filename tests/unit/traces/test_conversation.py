"""Conversations regenerated turn by turn: fresh answers as history, tool results where the script has them."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.traces.conversation import next_messages, pair, tool_fields
from slipstream.traces.prompts import Prompt
from slipstream.traces.trace import Trace

Message = dict[str, Any]
WRITES: Message = {"role": "assistant"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
TOOL: Message = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def user(text: str) -> Message:
    """A user turn."""
    return {"role": "user", "content": text}


def result(text: str, name: str | None = "weather") -> Message:
    """A tool turn of the script."""
    return {"role": "tool", "content": text} | ({} if name is None else {"name": name})


def call(identity: str, name: str = "weather") -> Message:
    """A tool call as a server returns it."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": "{}"}}


def prompt(*messages: Message, tools: tuple[Message, ...] = ()) -> Prompt:
    """A prompt with this script."""
    return Prompt(key="k", id=None, messages=messages, tools=tools, kind="all")


def said(
    answer: str | None, *calls: Message, thinking: str | None = None, finish_reason: str = "stop", turn: int = 0
) -> Trace:
    """A turn of the verifier."""
    return Trace("k", (1,), (2,), finish_reason, thinking, answer, turn, calls)


def test_a_single_turn_is_asked_once() -> None:
    script = prompt(user("u"))
    assert next_messages(script, ()) == [user("u")]
    assert next_messages(script, [said("G1")]) is None


def test_the_second_request_carries_the_system_turn_and_the_fresh_answer() -> None:
    """Field report 7: system, user1, assistant(old), user2."""
    script = prompt(SYSTEM, user("u1"), WRITES, user("u2"))
    assert next_messages(script, ()) == [SYSTEM, user("u1")]
    second = next_messages(script, [said("G1")])
    assert second == [SYSTEM, user("u1"), {"role": "assistant", "content": "G1"}, user("u2")]
    assert next_messages(script, [said("G1"), said("G2", turn=1)]) is None


def test_what_the_data_set_answered_is_never_sent() -> None:
    script = prompt(user("u1"), {"role": "assistant", "content": "old", "tool_calls": [call("old")]}, user("u2"))
    assert "old" not in str([next_messages(script, ()), next_messages(script, [said("G1")])])


def test_thinking_of_an_answered_user_turn_is_not_sent_back() -> None:
    script = prompt(user("u1"), WRITES, user("u2"))
    assert next_messages(script, [said("G1", thinking="hm")]) == [
        user("u1"),
        {"role": "assistant", "content": "G1"},
        user("u2"),
    ]


def test_user_turns_without_an_answer_between_go_together() -> None:
    script = prompt(user("u1"), user("u2"), WRITES, user("u3"), user("u4"))
    assert next_messages(script, ()) == [user("u1"), user("u2")]
    assert next_messages(script, [said("G")]) == [
        user("u1"),
        user("u2"),
        {"role": "assistant", "content": "G"},
        user("u3"),
        user("u4"),
    ]


def test_a_system_turn_in_the_middle_stays_in_its_place() -> None:
    script = prompt(SYSTEM, user("u1"), WRITES, SYSTEM, user("u2"))
    sent = next_messages(script, [said("G")])
    assert sent is not None
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "system", "user"]


LOOP = prompt(user("u1"), WRITES, result("sunny"), WRITES, user("u2"), tools=(TOOL,))


def test_a_call_is_answered_by_the_script_under_its_new_id() -> None:
    sent = next_messages(LOOP, [said(None, call("c9"))])
    assert sent == [
        user("u1"),
        {"role": "assistant", "content": "", "tool_calls": [call("c9")]},
        {"role": "tool", "tool_call_id": "c9", "name": "weather", "content": "sunny"},
    ]


def test_thinking_goes_back_only_inside_the_tool_loop() -> None:
    asked = said("Let me look.", call("c9"), thinking="which day?")
    sent = next_messages(LOOP, [asked])
    assert sent is not None
    assert sent[1] == {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [call("c9")],
        "reasoning": "which day?",
        "reasoning_content": "which day?",
    }
    after = next_messages(LOOP, [asked, said("Sunny.", thinking="so sunny", turn=1)])
    assert after == [
        user("u1"),
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call("c9")]},
        {"role": "tool", "tool_call_id": "c9", "name": "weather", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
        user("u2"),
    ]


def test_a_second_round_of_calls_keeps_the_thinking_of_the_first() -> None:
    script = prompt(user("u"), WRITES, result("cold"), WRITES, result("hot"), tools=(TOOL,))
    sent = next_messages(script, [said(None, call("c1"), thinking="t1"), said(None, call("c2"), thinking="t2", turn=1)])
    assert sent is not None
    assert [message.get("reasoning") for message in sent] == [None, "t1", None, "t2", None]
    assert [message.get("tool_call_id") for message in sent] == [None, None, "c1", None, "c2"]
    assert [sent[2]["content"], sent[4]["content"]] == ["cold", "hot"]


def test_parallel_calls_find_their_results_whatever_the_order() -> None:
    script = prompt(user("u"), WRITES, result("12:00", "time"), result("sunny"))
    sent = next_messages(script, [said(None, call("c1"), call("c2", "time"))])
    assert sent is not None
    assert sent[2:] == [
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "name": "time", "content": "12:00"},
    ]


def test_parallel_calls_of_one_tool_take_the_results_in_order() -> None:
    paired = pair([call("c1"), call("c2")], [result("Paris"), result("Rome")])
    assert paired is not None
    assert [(message["tool_call_id"], message["content"]) for message in paired] == [("c1", "Paris"), ("c2", "Rome")]


def test_results_without_names_go_by_order() -> None:
    paired = pair([call("c1"), call("c2", "time")], [result("sunny", None), result("12:00", None)])
    assert paired is not None
    assert [message["content"] for message in paired] == ["sunny", "12:00"]
    assert [message["name"] for message in paired] == ["weather", "time"]


def test_a_nameless_result_does_not_take_the_place_of_a_named_one() -> None:
    paired = pair([call("c1"), call("c2", "time")], [result("12:00", None), result("sunny", "weather")])
    assert paired is not None
    assert [message["content"] for message in paired] == ["sunny", "12:00"]


@pytest.mark.parametrize(
    ("calls", "results"),
    [
        ([call("c1", "other")], [result("sunny")]),
        ([call("c1")], []),
        ([call("c1"), call("c2")], [result("sunny")]),
        ([call("c1")], [result("sunny"), result("rain")]),
        ([{"id": "c1", "function": None}], [result("sunny")]),
    ],
    ids=["another tool", "no result", "one result too few", "one result too many", "a call without a name"],
)
def test_a_call_that_does_not_fit_the_results_ends_the_conversation(
    calls: list[Message], results: list[Message]
) -> None:
    assert next_messages(prompt(user("u"), WRITES, *results, WRITES, user("v")), [said(None, *calls)]) is None


def test_a_final_answer_instead_of_a_call_skips_the_old_results() -> None:
    assert next_messages(LOOP, [said("Sunny, I think.")]) == [
        user("u1"),
        {"role": "assistant", "content": "Sunny, I think."},
        user("u2"),
    ]
    assert next_messages(LOOP, [said("Sunny, I think."), said("G2", turn=1)]) is None


def test_a_final_answer_instead_of_the_last_call_is_the_end() -> None:
    assert next_messages(prompt(user("u"), WRITES, result("sunny")), [said("Sunny, I think.")]) is None


@pytest.mark.parametrize(
    "last",
    [
        said("half", finish_reason="length"),
        said(None, thinking="half", finish_reason="length"),
        said(None, call("c9"), finish_reason="length"),
        said(None, thinking="hm"),
        said(""),
    ],
    ids=["cut", "cut while thinking", "cut in a call", "no answer", "empty answer"],
)
def test_nothing_can_follow_a_cut_or_empty_answer(last: Trace) -> None:
    assert next_messages(prompt(user("u1"), WRITES, user("u2")), [last]) is None
    assert next_messages(LOOP, [last]) is None


def test_asking_again_gives_the_same_request_and_leaves_the_script_alone() -> None:
    script = prompt(SYSTEM, user("u1"), WRITES, user("u2"))
    answers = [said("G1")]
    first = next_messages(script, answers)
    assert first is not None
    first[0]["content"] = "changed"
    assert next_messages(script, answers) == [SYSTEM, user("u1"), {"role": "assistant", "content": "G1"}, user("u2")]
    assert SYSTEM["content"] == "Be brief."


@pytest.mark.parametrize(
    ("tools", "parsed", "fields"),
    [((TOOL,), False, {"tool_choice": "none"}), ((TOOL,), True, {}), ((), False, {}), ((), True, {})],
)
def test_a_server_without_a_tool_parser_is_told_not_to_call(
    tools: tuple[Message, ...], parsed: bool, fields: Message
) -> None:
    assert tool_fields(prompt(user("u"), tools=tools), parsed) == fields


TURNS = st.lists(st.sampled_from(["system", "user", "assistant"]), max_size=9)


@given(TURNS, st.integers(0, 9))
def test_scripts_without_tools_as_segments_between_answers(roles: list[str], answered: int) -> None:
    script = [user("first")]
    script += [WRITES if role == "assistant" else {"role": role, "content": f"{i}"} for i, role in enumerate(roles)]
    segments = [list(turns) for writes, turns in groupby(script, lambda turn: turn is WRITES) if not writes]
    expected: list[Message] | None = None
    if answered < len(segments):
        expected = segments[0]
        for number in range(answered):
            expected = [*expected, {"role": "assistant", "content": f"G{number}"}, *segments[number + 1]]
    answers = [said(f"G{number}", thinking="t", turn=number) for number in range(answered)]
    assert next_messages(prompt(*script), answers) == expected
