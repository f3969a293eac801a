"""Prompt rows: what a row may look like, what is taken from it, what names a prompt.

A row is a JSON object with turns in `messages` (role and content), in `conversations` (from and value, as ShareGPT
has them) or in `prompt`, or with a text in `prompt` (one user turn); optionally `id`, `tools` (a list or its JSON
text) and `kind` (or `domain`).

The turns become a script: what system, user and tools said, and `{"role": "assistant"}` where the verifier writes.
What an assistant wrote before is dropped.  The verifier always writes at the end, so that place is not marked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from slipstream.digest import digest

ROLES = frozenset({"system", "user", "assistant", "tool"})
SHAREGPT = {
    **{role: role for role in ROLES},
    "human": "user",
    **dict.fromkeys(("gpt", "model", "chatgpt", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation"), "tool"),
}
WRITES = "assistant"
TOOL_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    `key` depends on its content and declared id, not on where it stands.  `messages` is the script (see above);
    `file` and `row` (from 1) say where it was read.
    """

    key: str
    id: str | None
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    kind: str
    file: str = field(default="", compare=False)
    row: int = field(default=0, compare=False)

    @cached_property
    def content_key(self) -> str:
        """Equal for prompts that ask the same thing, whatever their ids."""
        return digest([self.messages, self.tools])

    def to_json(self) -> dict[str, Any]:
        """The row that the prompt artifact stores."""
        named = {"key": self.key, "id": self.id, "kind": self.kind, "file": self.file, "row": self.row}
        return {**named, "messages": self.messages, "tools": self.tools}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Prompt:
        """The inverse of `to_json`."""
        return Prompt(**{**row, "messages": tuple(row["messages"]), "tools": tuple(row["tools"])})


class BadRow(ValueError):
    """Why a row cannot be a prompt."""


def parse(row: Any, domain: str = "all") -> Prompt:
    """The prompt in a decoded row; `domain` is its kind when it names none.  Raises BadRow."""
    try:
        return _parse(row, domain)
    except RecursionError as error:
        raise BadRow("nested too deeply") from error


def _parse(row: Any, domain: str) -> Prompt:
    if not isinstance(row, dict):
        raise BadRow("not a JSON object")
    script = _script(_turns(row))
    tools = [_without_none(tool) for tool in _tools(row)]
    declared = row.get("id")
    name = None if declared is None else str(declared)
    kind = str(row.get("kind") or row.get("domain") or domain)
    try:
        kind.encode()
        key = digest({"id": name, "messages": script, "tools": tools})
    except UnicodeEncodeError as error:
        raise BadRow("text that is not valid Unicode (half of a surrogate pair)") from error
    except (ValueError, TypeError) as error:
        raise BadRow(f"a value that JSON cannot hold ({error})") from error
    return Prompt(key, name, tuple(script), tuple(tools), kind)


def _turns(row: dict[str, Any]) -> list[Any]:
    column = next((name for name in ("messages", "conversations", "prompt") if row.get(name) is not None), None)
    turns = row[column] if column else None
    if column == "prompt" and isinstance(turns, str):
        return [{"role": "user", "content": turns}]
    if column is None or (column == "prompt" and not isinstance(turns, list)):
        raise BadRow("neither `messages`, `conversations` nor a `prompt` text")
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"`{column}` is not a list of turns")
    return turns


def _tools(row: dict[str, Any]) -> list[Any]:
    tools = row.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = None
    if not isinstance(tools, list):
        raise BadRow("`tools` is not a list, nor the JSON text of one")
    return tools


def _script(turns: list[Any]) -> list[dict[str, Any]]:
    script: list[dict[str, Any]] = []
    calls: list[tuple[Any, Any]] = []  # id and function, as the old answer called them
    results = 0
    asked = False
    for turn in turns:
        role = _role(turn)
        if role == WRITES:
            if not asked:  # an old greeting: there is nothing to answer yet
                continue
            if script[-1]["role"] != WRITES:
                script.append({"role": WRITES})
                calls, results = [], 0
            calls += _calls(turn)
        elif role == "tool":
            if not script or script[-1]["role"] not in {WRITES, "tool"}:
                raise BadRow("a tool turn that follows no assistant turn")
            for text in _results(_text(turn)):
                named = _answers(turn, calls, results) or _embedded(text)
                script.append({"role": role, "content": text} | ({"name": named} if named else {}))
                results += 1
        else:
            script.append({"role": role, "content": _text(turn)} | _name(turn))
            if not script[-1]["content"].strip():
                raise BadRow(f"an empty {role} turn")
            asked = asked or role == "user"
    while script and script[-1]["role"] == WRITES:
        script.pop()
    if not asked or script[-1]["role"] == "system":
        raise BadRow("no user turn to answer")
    return script


def _role(turn: Any) -> str:
    role = None
    if isinstance(turn, dict):
        role = turn.get("role") or SHAREGPT.get(str(turn.get("from")))
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"a turn without a role of {', '.join(sorted(ROLES))}")
    return role


def _text(turn: dict[str, Any]) -> str:
    content = turn.get("content") if turn.get("role") else turn.get("value")
    if isinstance(content, list):
        content = "".join(_part(part) for part in content)
    if not isinstance(content, str):
        raise BadRow("a turn whose content is not text")
    return content


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise BadRow(f"a part of type {kind} in a turn's content, where only text is supported")
    if not isinstance(part.get("text"), str):
        raise BadRow("a turn whose content is not text")
    return str(part["text"])


def _name(turn: dict[str, Any]) -> dict[str, str]:
    name = turn.get("name")
    if name is not None and not isinstance(name, str):
        raise BadRow("a turn whose name is not text")
    return {} if name is None else {"name": name}


def _calls(turn: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    calls = turn.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        if isinstance(call, dict):
            function = call.get("function")
            yield call.get("id"), (function if isinstance(function, dict) else call).get("name")


def _results(text: str) -> list[str]:
    """One text a result: Hermes rows hold those of parallel calls in one turn."""
    found = [match.group() for match in TOOL_RESPONSE.finditer(text)]
    return found if len(found) > 1 else [text]


def _answers(turn: dict[str, Any], calls: list[tuple[Any, Any]], position: int) -> str | None:
    """The function whose result a tool turn is: by the call's id, the turn's own name, or its place."""
    identity = turn.get("tool_call_id")
    found = next((name for known, name in calls if identity is not None and known == identity), None)
    found = found or _name(turn).get("name")
    if not found and position < len(calls) and (identity is None or calls[position][0] is None):
        found = calls[position][1]
    return found if isinstance(found, str) and found else None


def _embedded(text: str) -> str | None:
    match = TOOL_RESPONSE.search(text)
    try:
        payload = json.loads(match.group(1)) if match else None
    except ValueError:
        return None
    name = payload.get("name") if isinstance(payload, dict) else None
    return name if isinstance(name, str) and name else None


def _without_none(value: Any) -> Any:
    """`value` without the None that Parquet and saved data sets put where a nested field is missing."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
