"""The verifier's tokenizer and chat template, for servers that do not tokenize on request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream import verifier
from slipstream.chat import Refused
from slipstream.config import VerifierConfig
from slipstream.errors import InputError


class LocalTokenizer:
    """Renders as the server would, from the files in the verifier's folder; the methods are `chat.Server`'s."""

    def __init__(self, config: VerifierConfig) -> None:
        from transformers import AutoTokenizer

        folder = verifier.folder_of(config)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        except Exception as error:
            raise InputError(
                f"{folder}: its tokenizer does not load here ({error}) and the server has no /tokenize; "
                "use a server that returns token ids"
            ) from error

    async def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any],
        generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation under the chat template; raises Refused when the template does not take it."""
        try:
            ids = self._tokenizer.apply_chat_template(
                [_parsed(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=generation_prompt,
                tokenize=True,
                return_dict=False,
                **template,
            )
        except Exception as error:  # a template may raise anything
            raise Refused(f"template: the conversation does not render ({error})") from error
        return [int(token) for token in ids]

    async def tokenize_text(self, text: str) -> list[int]:
        """Token ids of `text` without anything added."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


def _parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    """`message` with the arguments of its tool calls as objects, which is how vLLM hands them to the template."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = call["function"].get("arguments")
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) or arguments is None else arguments
    except ValueError:
        return {}  # as vLLM does with what a model wrote wrongly
