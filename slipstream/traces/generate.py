"""Asking servers for the traces that the pool does not have yet: one async client inside one task."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from slipstream import chat
from slipstream.concurrent import run_workers
from slipstream.config import TracesConfig
from slipstream.errors import TransientError
from slipstream.progress import Progress, Report
from slipstream.serving import Endpoint
from slipstream.traces.pool import TracePool
from slipstream.traces.prompts import Prompt


@dataclass
class Outcome:
    """What a generation did: answers recorded, tokens generated, prompts without an answer and why."""

    requested: int = 0
    output_tokens: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def sampling(config: TracesConfig, key: str) -> dict[str, Any]:
    """The sampling fields of one request; the seed follows the prompt, so a repeated request is the same."""
    fields: dict[str, Any] = {"max_tokens": config.max_tokens, "temperature": config.temperature}
    if config.temperature > 0:
        seed = int.from_bytes(hashlib.sha256(f"{config.seed}:{key}".encode()).digest()[:4], "big") >> 1
        fields |= {"top_p": config.top_p, "seed": seed}
        if config.top_k:
            fields["top_k"] = config.top_k
    return fields


def generate(
    prompts: Sequence[Prompt], endpoints: Sequence[Endpoint], config: TracesConfig, pool: TracePool, report: Report
) -> Outcome:
    """Asks for every prompt and records each answer in the pool as it arrives."""
    return asyncio.run(_generate(prompts, endpoints, config, pool, report))


async def _generate(
    prompts: Sequence[Prompt], endpoints: Sequence[Endpoint], config: TracesConfig, pool: TracePool, report: Report
) -> Outcome:
    outcome = Outcome()
    started = time.monotonic()
    queue = iter(prompts)
    busy = dict.fromkeys(range(len(endpoints)), 0)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(chat.client(e.url, config.request_timeout_s)) for e in endpoints]

        async def work() -> None:
            for prompt in queue:
                target = min(busy, key=lambda index: busy[index])
                busy[target] += 1
                try:
                    trace = await chat.ask(
                        clients[target],
                        endpoints[target].model,
                        prompt,
                        sampling(config, prompt.key),
                        config.max_attempts,
                    )
                except (chat.Refused, TransientError) as error:
                    outcome.failed[prompt.key] = str(error)
                else:
                    pool.add(trace)
                    outcome.requested += 1
                    outcome.output_tokens += len(trace.output_ids)
                finally:
                    busy[target] -= 1
                outcome.seconds = time.monotonic() - started
                speed = outcome.output_tokens / max(outcome.seconds, 1e-9)
                done = outcome.requested + len(outcome.failed)
                report(
                    Progress(done, len(prompts), "prompts", {"tokens/s": round(speed), "failed": len(outcome.failed)})
                )

        await run_workers(work, min(config.concurrency, len(prompts)))
    return outcome
