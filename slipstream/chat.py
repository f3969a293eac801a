"""One chat request to a vLLM server and what came back, as token ids.

Asks for `return_token_ids`, so nothing is ever re-tokenised.  Retries are owned here alone (the client's own
are off), bounded, and only for transient failures.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from slipstream.errors import ServerError, SlipstreamError, TransientError, is_transient_status
from slipstream.traces.prompts import Prompt
from slipstream.traces.trace import Trace

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class Refused(SlipstreamError):
    """The server will not answer this request (a 4xx that no repetition changes)."""


@asynccontextmanager
async def client(url: str, timeout_s: float) -> AsyncIterator[AsyncOpenAI]:
    """A client bound to the running event loop, closed on exit."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=timeout_s) as opened:
        yield opened


async def ask(openai: AsyncOpenAI, model: str, prompt: Prompt, sampling: dict[str, Any], attempts: int) -> Trace:
    """The server's answer to `prompt`.

    `sampling` holds OpenAI fields (`max_tokens`, `temperature`, `top_p`, `seed`) and vLLM's (`top_k`).
    Raises Refused on a permanent 4xx, TransientError when `attempts` ran out, ServerError when the answer
    breaks the contract (no token ids).
    """
    for attempt in range(1, attempts + 1):
        try:
            return await _ask_once(openai, model, prompt, sampling)
        except TransientError:
            if attempt == attempts:
                raise
            # full jitter: 0 … 1, 2, 4 … 30 s
            await asyncio.sleep(random.uniform(0, min(30.0, 2.0 ** (attempt - 1))))
    raise AssertionError("unreachable: attempts is at least 1")


async def _ask_once(openai: AsyncOpenAI, model: str, prompt: Prompt, sampling: dict[str, Any]) -> Trace:
    import openai as sdk

    fields: dict[str, Any] = {"model": model, "messages": list(prompt.messages)}
    if prompt.tools:
        fields["tools"] = list(prompt.tools)
    extra = {"return_token_ids": True}
    for name, value in sampling.items():
        (extra if name == "top_k" else fields)[name] = value
    try:
        answer = await openai.chat.completions.create(**fields, extra_body=extra)
    except sdk.APIStatusError as error:
        if is_transient_status(error.status_code):
            raise TransientError(f"prompt {prompt.key}: HTTP {error.status_code}") from error
        raise Refused(f"prompt {prompt.key}: HTTP {error.status_code}: {error.message}") from error
    except (sdk.APIConnectionError, sdk.APITimeoutError) as error:
        raise TransientError(f"prompt {prompt.key}: {type(error).__name__}") from error
    except (sdk.APIResponseValidationError, ValueError) as error:
        raise ServerError(f"prompt {prompt.key}: the server's answer is not a chat completion ({error})") from error
    if not hasattr(answer, "model_dump"):
        raise ServerError(f"prompt {prompt.key}: the server's answer is not a chat completion ({str(answer)[:80]})")
    return to_trace(prompt.key, answer.model_dump())


def to_trace(key: str, answer: dict[str, Any]) -> Trace:
    """A chat completion (as a mapping) as a trace; raises ServerError when it carries no token ids.

    Reads both spellings of the thinking text: `reasoning` (new servers) and `reasoning_content` (old ones).
    """
    choice = (answer.get("choices") or [{}])[0]
    prompt_ids, output_ids = answer.get("prompt_token_ids"), choice.get("token_ids")
    if not prompt_ids or output_ids is None:
        raise ServerError("the server returned no token ids; it must be vLLM 0.10.2 or newer (`return_token_ids`)")
    message = choice.get("message") or {}
    thinking = message.get("reasoning")
    return Trace(
        key=key,
        prompt_ids=tuple(prompt_ids),
        output_ids=tuple(output_ids),
        finish_reason=str(choice.get("finish_reason")),
        thinking=message.get("reasoning_content") if thinking is None else thinking,
        answer=message.get("content"),
    )
