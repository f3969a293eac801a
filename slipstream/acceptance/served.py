"""One server answering the held-out prompts: its outputs, its speed, its counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from slipstream import chat
from slipstream.acceptance.counters import Counters, parse
from slipstream.concurrent import run_async, run_workers
from slipstream.config import AcceptanceConfig, VerifierConfig
from slipstream.errors import ServerError, SlipstreamError, TransientError
from slipstream.serving import Endpoint
from slipstream.traces.conversation import next_messages, tool_fields
from slipstream.traces.prompts import Prompt
from slipstream.traces.room import Room
from slipstream.traces.trace import Trace

WARM_UP = 2  # prompts answered before the clock starts


@dataclass(frozen=True)
class Measurement:
    """One pass over the prompts: each one's turns in prompt order, seconds on the wall, counters of exactly this."""

    conversations: list[list[Trace]]
    seconds: float
    counters: Counters

    @property
    def output_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(trace.output_ids) for turns in self.conversations for trace in turns)


def measure(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    config: AcceptanceConfig,
    verifier: VerifierConfig,
    on_answer: Callable[[], None],
) -> Measurement:
    """Has every prompt's conversation, greedily, `concurrency` at a time.

    A conversation ends where the server's context has no room for a token more, a prompt that is too long before its
    first turn.  Raises what the first failing request raised: nothing may be missing from a measurement.
    """
    return run_async(_measure(endpoint, prompts, config, verifier, on_answer))


async def _counters(endpoint: Endpoint) -> Counters:
    async with httpx.AsyncClient(timeout=30) as http:
        answer = await http.get(endpoint.metrics_url)
    if answer.status_code != 200:
        raise ServerError(f"{endpoint.metrics_url}: HTTP {answer.status_code}, so nothing can be counted")
    return parse(answer.text)


async def _measure(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    config: AcceptanceConfig,
    verifier: VerifierConfig,
    on_answer: Callable[[], None],
) -> Measurement:
    room = Room(config.max_tokens, verifier)
    answers: dict[str, list[Trace]] = {}
    async with chat.connect([endpoint], config.request_timeout_s) as (server,):
        await room.admit(server)
        warm = 0
        for prompt in prompts:
            warm += bool(await _converse(server, prompt, room, verifier))
            if warm == WARM_UP:
                break
        before = await _counters(endpoint)
        started = time.monotonic()
        queue = iter(prompts)

        async def work() -> None:
            for prompt in queue:
                answers[prompt.key] = await _converse(server, prompt, room, verifier)
                on_answer()

        await run_workers(work, min(config.concurrency, len(prompts)))
        seconds = time.monotonic() - started
        after = await _counters(endpoint)
    return Measurement([answers[prompt.key] for prompt in prompts], seconds, after.since(before))


async def _converse(server: chat.Server, prompt: Prompt, room: Room, verifier: VerifierConfig) -> list[Trace]:
    fields = {"temperature": 0.0, **tool_fields(prompt, verifier.tool_call_parser is not None)}
    turns: list[Trace] = []
    while (messages := next_messages(prompt, turns)) is not None:
        try:
            tokens = await room.tokens(server, messages, prompt.tools, {})
            if tokens < 1:
                return turns
            answer = await server.chat(messages, prompt.tools, fields | {"max_tokens": tokens})
        except SlipstreamError as error:
            kind = TransientError if error.transient else ServerError
            raise kind(f"prompt {prompt.key}: {error}") from error
        if answer.prompt_ids is None or answer.output_ids is None:
            raise ServerError(f"{server.endpoint.url}: returned no token ids; it must be vLLM 0.10.2 or newer")
        turns.append(Trace.of(answer, prompt.key, len(turns), fields, answer.prompt_ids, answer.output_ids))
    return turns
