"""Token ids for servers that return none: rendered again from the texts, and compared with the server's counts.

Re-encoding text can give other tokens than the model sampled (two pieces merge into one).  So a rebuilt row is used
only when prompt and output are as long as the server's `usage` says; a server that tells no counts gives no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slipstream.chat import Answer, Message, Refused, Server, assistant_turn
from slipstream.config import VerifierConfig
from slipstream.local_tokenizer import LocalTokenizer
from slipstream.traces.trace import MISMATCHED, REBUILT
from slipstream.verifier import THINK_CLOSE


class Renderer(Protocol):
    """What turns a conversation into token ids: the server's /tokenize, or the verifier's files."""

    async def tokenize_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        template: Mapping[str, Any],
        generation_prompt: bool = True,
    ) -> list[int] | None: ...

    async def tokenize_text(self, text: str) -> list[int] | None: ...


async def renderer_for(server: Server, config: VerifierConfig) -> Renderer:
    """The server itself when it tokenizes conversations, else the verifier's own tokenizer.

    Raises InputError when that does not load.
    """
    try:
        if await server.tokenize_chat([{"role": "user", "content": "a"}], [], {}):
            return server
    except Refused:  # engines whose /tokenize takes text alone
        pass
    return LocalTokenizer(config)


async def rebuild(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Message], template: Mapping[str, Any], got: Answer
) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Prompt ids, output ids, and REBUILT or MISMATCHED, for an answer without ids."""
    prompt = await renderer.tokenize_chat(messages, tools, template) or []
    output = await _output(renderer, prompt, messages, tools, template, got)
    return tuple(prompt), tuple(output), REBUILT if got.usage == (len(prompt), len(output)) else MISMATCHED


async def _output(
    renderer: Renderer,
    prompt: Sequence[int],
    messages: Sequence[Message],
    tools: Sequence[Message],
    template: Mapping[str, Any],
    got: Answer,
) -> list[int]:
    if got.finish_reason == "length":  # no closing tag, no end token: as far as the model came
        text = got.thinking or ""
        if got.answer:
            text = f"{text}{THINK_CLOSE}{got.answer}" if got.thinking else got.answer
        return await renderer.tokenize_text(text) or []
    said = assistant_turn(got.answer, got.thinking, got.tool_calls)
    whole = await renderer.tokenize_chat([*messages, said], tools, template, generation_prompt=False) or []
    return whole[len(prompt) :] if whole[: len(prompt)] == list(prompt) else []
