"""Prompt rows: what is taken from them, why some are none, what names a prompt."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from slipstream.traces import prompts
from slipstream.traces.prompts import BadRow, Prompt

WRITES = {"role": "assistant"}
TEXT = {"type": "text", "text": "see"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CLOCK = {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{}"}}


def turns(*given: Any) -> dict[str, Any]:
    """A row of turns: a text is a user's."""
    return {"messages": [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in given]}


def system(text: Any) -> dict[str, Any]:
    """A system turn."""
    return {"role": "system", "content": text}


def old(text: Any = "old", *calls: dict[str, Any]) -> dict[str, Any]:
    """An assistant turn of the data set."""
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def result(text: str, **more: Any) -> dict[str, Any]:
    """A tool turn."""
    return {"role": "tool", "content": text, **more}


def script(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The script of a row."""
    return list(prompts.parse(row).messages)


def share(*given: tuple[str, str]) -> dict[str, Any]:
    """A row of ShareGPT's turns."""
    return {"conversations": [{"from": who, "value": text} for who, text in given]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "not a JSON object"),
        ({}, "neither `messages`, `conversations` nor a `prompt` text"),
        ({"prompt": 7}, "neither `messages`, `conversations` nor a `prompt` text"),
        ({"messages": []}, "`messages` is not a list of turns"),
        ({"messages": "hi"}, "`messages` is not a list of turns"),
        ({"conversations": "hi"}, "`conversations` is not a list of turns"),
        ({"prompt": []}, "`prompt` is not a list of turns"),
        (turns({"role": "robot", "content": "x"}), "without a role"),
        (turns({"role": ["user"], "content": "x"}), "without a role"),
        (turns({"role": None, "content": "x"}), "without a role"),
        ({"messages": ["x"]}, "without a role"),
        (share(("robot", "x")), "without a role"),
        (turns({"role": "user", "content": None}), "not text"),
        (turns({"role": "user", "content": 5}), "not text"),
        (turns("x", old(), {"role": "tool", "content": {"a": 1}}), "not text"),
        (turns({"role": "user", "content": "x", "name": 7}), "name is not text"),
        ({"prompt": " \n"}, "an empty user turn"),
        (turns("x", old(), ""), "an empty user turn"),
        (turns(system(" \n"), "x"), "an empty system turn"),
        (turns(system(None), "x"), "not text"),
        (turns(system("x")), "no user turn"),
        (turns(system("x"), old()), "no user turn"),
        (turns("x", old(), system("y")), "no user turn"),
        (turns(old()), "no user turn"),
        (turns("x", result("4")), "a tool turn that follows no assistant turn"),
        (turns("x", old(), "y", result("4")), "a tool turn that follows no assistant turn"),
        (turns(old("", CALL), result("4"), "x"), "a tool turn that follows no assistant turn"),
        ({"prompt": "x", "tools": {"a": 1}}, "`tools` is not a list, nor the JSON text of one"),
        ({"prompt": "x", "tools": "[1"}, "`tools` is not a list, nor the JSON text of one"),
        ({"prompt": "x", "tools": '{"a": 1}'}, "`tools` is not a list, nor the JSON text of one"),
        ({"prompt": "x", "tools": "[" * 100_000}, "nested too deeply"),
        (turns({"role": "user", "content": [TEXT, {"type": "image_url"}]}), "a part of type image_url"),
        (turns({"role": "user", "content": [{"type": "input_audio"}]}), "a part of type input_audio"),
        (turns({"role": "user", "content": ["x"]}), "a part of type str"),
        (turns({"role": "user", "content": [{"text": "x"}]}), "a part of type None"),
        (turns({"role": "user", "content": [{"type": "text", "text": None}]}), "not text"),
        (turns({"role": "user", "content": []}), "an empty user turn"),
    ],
)
def test_why_a_row_is_no_prompt(row: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        prompts.parse(row)


def test_nesting_that_json_reads_but_python_does_not_walk_is_a_bad_row() -> None:
    tools: list[Any] = []
    for _ in range(5000):
        tools = [tools]
    with pytest.raises(BadRow, match="nested too deeply"):
        prompts.parse({"prompt": "x", "tools": tools})


def test_prompt_text_is_one_user_turn() -> None:
    assert script({"prompt": "hi"}) == [{"role": "user", "content": "hi"}]


def test_old_answers_leave_a_place_and_nothing_else() -> None:
    """Field report 7: what the data set's assistant said must not be what the verifier goes on from."""
    prompt = prompts.parse(turns(system("Be brief."), "first", old("the old answer"), "second"))
    assert [turn["role"] for turn in prompt.messages] == ["system", "user", "assistant", "user"]
    assert prompt.messages[2] == WRITES
    assert "old answer" not in json.dumps(prompt.to_json())
    assert prompt.messages[0] == system("Be brief.")


@pytest.mark.parametrize("answer", ["another", None, ["parts"], 7, "\ud800"])
def test_rows_that_differ_in_old_answers_only_are_one_prompt(answer: Any) -> None:
    one, other = (prompts.parse(turns("a", old(text), "b", old(text))) for text in ("old", answer))
    assert one.content_key == other.content_key
    assert one == other


def test_the_verifier_answers_last_so_trailing_answers_are_not_marked() -> None:
    plain = [{"role": "user", "content": "a"}, WRITES, {"role": "user", "content": "b"}]
    assert script(turns("a", old(), "b")) == plain
    assert script(turns("a", old(), "b", old(), old("more"))) == plain


def test_a_run_of_answers_is_one_place() -> None:
    roles = [turn["role"] for turn in script(turns("a", old(), old("more"), "b"))]
    assert roles == ["user", "assistant", "user"]


def test_an_answer_before_any_question_has_no_place() -> None:
    expected = [system("s"), {"role": "user", "content": "a"}]
    assert script(turns(system("s"), old("Hello!"), "a")) == expected


def test_user_turns_keep_their_name() -> None:
    named = {"role": "user", "content": "x", "name": "ann"}
    assert script(turns(named | {"weight": 1, "tool_calls": None})) == [named]


@pytest.mark.parametrize("user", ["human", "user"])
@pytest.mark.parametrize("assistant", ["gpt", "assistant", "model", "chatgpt", "function_call"])
@pytest.mark.parametrize("tool", ["tool", "function", "observation"])
def test_sharegpt(user: str, assistant: str, tool: str) -> None:
    row = share(("system", "s"), (user, "q"), (assistant, "old"), (tool, "4"), (assistant, "old"), (user, "r"))
    content = {"system": "s", "tool": "4"}
    assert script(row) == [
        {"role": "system", "content": content["system"]},
        {"role": "user", "content": "q"},
        WRITES,
        {"role": "tool", "content": content["tool"]},
        WRITES,
        {"role": "user", "content": "r"},
    ]


def test_the_same_conversation_in_every_column_is_the_same_prompt() -> None:
    given = turns("a", old(), "b")["messages"]
    shared = share(("human", "a"), ("gpt", "old"), ("human", "b"))
    rows = [{"messages": given}, {"conversations": given}, {"prompt": given}, shared, shared | {"messages": None}]
    assert len({prompts.parse(row).key for row in rows}) == 1


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?", "image_url": None}]
    assert script(turns({"role": "user", "content": parts})) == [{"role": "user", "content": "What is 2+2?"}]


def test_tools_as_json_text() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    as_list, as_text = (prompts.parse({"prompt": "x", "tools": given}) for given in (tools, json.dumps(tools)))
    assert list(as_text.tools) == tools
    assert as_text == as_list
    assert (
        prompts.parse({"prompt": "x", "tools": ""}).tools == prompts.parse({"prompt": "x", "tools": "[]"}).tools == ()
    )


def test_results_are_named_by_the_id_of_the_call() -> None:
    """Neither the order of the results nor the call's id is the verifier's: its calls have their own."""
    row = turns("q", old(None, CALL, CLOCK), result("12:00", tool_call_id="c2"), result("warm", tool_call_id="c1"))
    assert script(row)[1:] == [
        WRITES,
        {"role": "tool", "content": "12:00", "name": "clock"},
        {"role": "tool", "content": "warm", "name": "weather"},
    ]


def test_an_id_weighs_more_than_the_name_in_the_turn() -> None:
    row = turns("q", old(None, CALL), result("warm", tool_call_id="c1", name="other"))
    assert script(row)[2]["name"] == "weather"


def test_results_without_ids_are_named_by_their_place() -> None:
    flat = {"name": "clock", "arguments": {}}
    called = old(None, {"function": {"name": "weather"}}, flat)
    row = turns("q", called, result("warm"), result("12:00"), called, result("cold"))
    assert [turn.get("name") for turn in script(row)] == [None, None, "weather", "clock", None, "weather"]


def test_results_name_themselves() -> None:
    assert script(turns("q", old(), result("warm", name="weather")))[2]["name"] == "weather"


def test_a_result_that_nothing_names_has_no_name() -> None:
    unknown = script(turns("q", old(None, CALL), result("1", tool_call_id="other"), result("2"), result("3")))
    assert unknown[2:] == [result("1"), result("2"), result("3")]


def test_names_inside_hermes_results() -> None:
    text = '<tool_response>\n{"name": "weather", "content": {"t": 21}}\n</tool_response>'
    row = share(("human", "q"), ("gpt", "<tool_call>…</tool_call>"), ("tool", text), ("gpt", "It is 21."))
    assert script(row) == [{"role": "user", "content": "q"}, WRITES, result(text, name="weather")]


@pytest.mark.parametrize("payload", ["{'name': 'weather'}", "[1]", '{"name": 7}', "{}"])
def test_hermes_results_without_a_readable_name(payload: str) -> None:
    text = f"<tool_response>{payload}</tool_response>"
    assert script(turns("q", old(), result(text)))[2] == result(text)


def test_hermes_results_of_parallel_calls_are_turns_of_their_own() -> None:
    texts = [f'<tool_response>{{"name": "{name}", "content": 1}}</tool_response>' for name in ("weather", "clock")]
    found = script(share(("human", "q"), ("gpt", "old"), ("tool", "\n".join(texts))))
    assert found[2:] == [result(texts[0], name="weather"), result(texts[1], name="clock")]


def key_of(text: str) -> str:
    """32 hex digits over canonical JSON, worked out here."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def test_the_key_is_the_hash_of_id_turns_and_tools() -> None:
    row = {"id": 7, "messages": [{"role": "user", "content": "hi"}], "kind": "k", "source": "ignored"}
    prompt = prompts.parse(row)
    assert prompt.key == key_of('{"id":"7","messages":[{"content":"hi","role":"user"}],"tools":[]}')
    assert (prompt.id, prompt.kind) == ("7", "k")
    assert prompts.parse({**row, "kind": "other"}).key == prompt.key
    assert prompts.parse({**row, "id": 8}).key != prompt.key
    assert prompts.parse({**row, "id": 8}).content_key == prompt.content_key
    assert prompts.parse({**row, "tools": [{"name": "f"}]}).content_key != prompt.content_key


def test_the_key_of_several_turns_is_that_of_the_script() -> None:
    turn = '{"content":"a","role":"user"}'
    text = f'{{"id":null,"messages":[{turn},{{"role":"assistant"}},{turn}],"tools":[]}}'
    assert prompts.parse(turns("a", old(), "a")).key == key_of(text)


@pytest.mark.parametrize(
    ("row", "kind"), [({}, "math"), ({"domain": "code"}, "code"), ({"kind": "k", "domain": "code"}, "k")]
)
def test_the_kind_of_rows_that_name_none(row: dict[str, str], kind: str) -> None:
    assert prompts.parse({"prompt": "x", **row}, "math").kind == kind


def test_the_place_of_a_prompt_is_no_part_of_it() -> None:
    row = prompts.parse({"id": "a", "prompt": "x"}).to_json()
    moved = Prompt.from_json({**row, "file": "other.jsonl", "row": 9})
    assert moved == Prompt.from_json(row)
    assert (moved.file, moved.row) == ("other.jsonl", 9)


def test_stored_form_round_trip() -> None:
    row = turns(system("s"), "a", old(), "b") | {"id": "a", "tools": [{"name": "f"}], "domain": "d"}
    prompt = prompts.parse(row)
    stored = json.loads(json.dumps({**prompt.to_json(), "file": "f.jsonl", "row": 3}))
    again = Prompt.from_json(stored)
    assert again == prompt
    assert json.loads(json.dumps(again.to_json())) == stored
    assert prompt.kind == "d"
