"""A prompt's conversation, regenerated turn by turn with the verifier's fresh answers as history.

The prompt's `messages` are a script: what system, user and tools said, with `{"role": "assistant"}` where the
verifier writes; it also writes at the end.  What it wrote before is not in the script and never sent.

Tools are not run: a call is answered by the result that the script holds for the same tool.  A conversation ends
where the script ends, where an answer was cut or empty, and where a call has no result in the script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.chat import Message, assistant_turn
from slipstream.traces.prompts import Prompt
from slipstream.traces.trace import Trace

WRITES = "assistant"


def next_messages(prompt: Prompt, answers: Sequence[Trace]) -> list[Message] | None:
    """What to send for the turn after `answers` (one a turn, in order), or None when the conversation is over."""
    script = [*prompt.messages, {"role": WRITES}]
    given = iter(answers)
    messages: list[Message] = []
    position = 0
    while position < len(script):
        turn = script[position]
        position += 1
        if turn["role"] != WRITES:
            messages.append(dict(turn))
            continue
        answer = next(given, None)
        if answer is None:
            return _as_at_inference(messages)
        if answer.truncated or not (answer.answer or answer.tool_calls):
            return None
        thinking = answer.thinking if answer.tool_calls else None
        messages.append(assistant_turn(answer.answer, thinking, answer.tool_calls))
        results = _following(script, position, {"tool"})
        if answer.tool_calls:
            paired = pair(answer.tool_calls, results)
            if paired is None:
                return None
            messages += paired
            position += len(results)
        else:
            position += len(_following(script, position, {"tool", WRITES}))
    return None


def tool_fields(prompt: Prompt, parsed: bool) -> dict[str, Any]:
    """Request fields for a prompt with tools: a vLLM without --tool-call-parser refuses it unless told `none`."""
    return {"tool_choice": "none"} if prompt.tools and not parsed else {}


def _following(script: Sequence[Message], position: int, roles: set[str]) -> list[Message]:
    end = position
    while end < len(script) and script[end]["role"] in roles:
        end += 1
    return list(script[position:end])


def _as_at_inference(messages: list[Message]) -> list[Message]:
    """Thinking goes back to the server only inside a tool loop, after the last user turn, as clients send it."""
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [
        {key: value for key, value in message.items() if i > last_user or not key.startswith("reasoning")}
        for i, message in enumerate(messages)
    ]


def pair(calls: Sequence[Message], results: Sequence[Message]) -> list[Message] | None:
    """Tool messages that answer `calls` one to one by the tool's name, or None when they do not fit.

    A result without a name fits any call.
    """
    left = list(results)
    found: dict[int, Message] = {}
    for unnamed in (False, True):  # a result with the name first, one without a name for what is left
        for i, call in enumerate(calls):
            wanted = None if unnamed else _name(call)
            match = next((result for result in left if result.get("name") == wanted), None)
            if i not in found and match is not None:
                left.remove(match)
                found[i] = match
    if left or len(found) < len(calls):
        return None
    paired: list[Message] = []
    for i, call in enumerate(calls):
        answered = {
            "role": "tool",
            "tool_call_id": call.get("id"),
            "name": _name(call),
            "content": found[i].get("content"),
        }
        paired.append({key: value for key, value in answered.items() if value is not None})
    return paired


def _name(call: Message) -> Any:
    return (call.get("function") or {}).get("name")
