"""One server answering the held-out prompts: its outputs, its speed, its counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from slipstream import chat
from slipstream.acceptance.counters import Counters, parse
from slipstream.concurrent import run_workers
from slipstream.config import AcceptanceConfig
from slipstream.errors import ServerError
from slipstream.serving import Endpoint
from slipstream.traces.prompts import Prompt
from slipstream.traces.trace import Trace

WARM_UP = 2  # prompts answered before the clock starts


@dataclass(frozen=True)
class Measurement:
    """One pass over the prompts: traces in prompt order, seconds on the wall, counters of exactly this pass."""

    traces: list[Trace]
    seconds: float
    counters: Counters

    @property
    def output_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(trace.output_ids) for trace in self.traces)


def measure(
    endpoint: Endpoint, prompts: Sequence[Prompt], config: AcceptanceConfig, on_answer: Callable[[], None]
) -> Measurement:
    """Asks for every prompt, greedily, `concurrency` at a time."""
    return asyncio.run(_measure(endpoint, prompts, config, on_answer))


async def _counters(endpoint: Endpoint) -> Counters:
    async with httpx.AsyncClient(timeout=30) as http:
        answer = await http.get(endpoint.metrics_url)
    if answer.status_code != 200:
        raise ServerError(f"{endpoint.metrics_url}: HTTP {answer.status_code}, so nothing can be counted")
    return parse(answer.text)


async def _measure(
    endpoint: Endpoint, prompts: Sequence[Prompt], config: AcceptanceConfig, on_answer: Callable[[], None]
) -> Measurement:
    sampling = {"max_tokens": config.max_tokens, "temperature": 0.0}
    answers: dict[str, Trace] = {}
    async with chat.client(endpoint.url, config.request_timeout_s) as openai:
        for prompt in prompts[:WARM_UP]:
            await chat.ask(openai, endpoint.model, prompt, sampling, attempts=1)
        before = await _counters(endpoint)
        started = time.monotonic()
        queue = iter(prompts)

        async def work() -> None:
            for prompt in queue:
                answers[prompt.key] = await chat.ask(openai, endpoint.model, prompt, sampling, attempts=1)
                on_answer()

        await run_workers(work, min(config.concurrency, len(prompts)))
        seconds = time.monotonic() - started
        after = await _counters(endpoint)
    return Measurement([answers[prompt.key] for prompt in prompts], seconds, after.since(before))
