"""Asking servers for the turns that the pool does not have yet: one async client inside one task."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from slipstream import chat
from slipstream.chat import Answer, Message, Server
from slipstream.concurrent import run_async, run_workers
from slipstream.config import RunConfig
from slipstream.errors import TransientError
from slipstream.progress import Progress, Report
from slipstream.serving import Endpoint
from slipstream.special_tokens import check_loaded, check_served
from slipstream.traces import sampling
from slipstream.traces.conversation import next_messages, tool_fields
from slipstream.traces.fleet import Fleet, sailing
from slipstream.traces.pool import TracePool
from slipstream.traces.prompts import Prompt
from slipstream.traces.rebuild import Renderer, rebuild, renderer_for
from slipstream.traces.throughput import Throughput
from slipstream.traces.trace import SERVER, Trace
from slipstream.verifier import folder_of

TEMPLATE_MARGIN = 16
MANY_FAILURES = 100  # below so many a share says little
COMMIT_EVERY_S = 0.05  # answers that arrive faster than this share a commit
Asked = Callable[[int], Iterable[tuple[str, Prompt]]]


@dataclass
class Outcome:
    """What one execution did: prompts answered and failed, turns and tokens generated, who was the limit."""

    answered: int = 0
    failed: int = 0
    requested: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    retried: int = 0
    absences: int = 0
    backoffs: int = 0
    stopped: bool = False
    special_tokens: str = "not asked"
    throughput: dict[str, Any] = field(default_factory=dict)


def generate(
    asked: Asked, total: int, endpoints: Sequence[Endpoint], config: RunConfig, pool: TracePool, report: Report
) -> Outcome:
    """Asks for every prompt that `asked` gives (`total` of them) and records each turn as it arrives.

    `asked(longer_than)` gives row keys and prompts, without those whose record has no more bytes than that.

    Raises InputError when the server's special tokens are not the verifier's, TransientError when all servers
    stay away.  A prompt that fails is recorded with its reason and the others go on; when more have failed than
    `traces.max_rejected_share` of them allows, the rest is not asked.
    """
    return run_async(_generate(asked, total, endpoints, config, pool, report))


async def _generate(
    asked: Asked, total: int, endpoints: Sequence[Endpoint], config: RunConfig, pool: TracePool, report: Report
) -> Outcome:
    traces = config.traces
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(chat.connect(endpoints, traces.request_timeout_s))
        generation = _Generation(config, pool, report, total)
        fleet = sailing(servers, traces.concurrency, traces.endpoint_patience_s, generation.admit)
        generation.fleet = await stack.enter_async_context(fleet)
        await generation.check_lengths(asked)
        sampler = asyncio.ensure_future(generation.throughput.sample())
        stack.callback(sampler.cancel)
        queue = iter(asked(0))

        async def work() -> None:
            for key, prompt in queue:
                if generation.outcome.stopped:
                    return
                await generation.converse(key, prompt)

        try:
            await run_workers(work, min(traces.concurrency, total))
        finally:
            pool.commit()
        return generation.end()


class _TooLong(Exception):
    """The conversation so far leaves no room for a token of answer."""


class _Generation:
    """One execution: its counters and the steps of one prompt."""

    fleet: Fleet

    def __init__(self, config: RunConfig, pool: TracePool, report: Report, total: int) -> None:
        self.config, self.pool, self.report, self.total = config, pool, report, total
        self.outcome = Outcome()
        self.throughput = Throughput()
        self.context: int | None = None  # the smallest of the servers'
        self._template_tokens = 0  # what the chat template adds to a conversation, and a margin
        self._committed = 0.0
        self._lengths: dict[str, int] = {}  # tokens of the prompts that may not fit with a full answer
        self._renderer: Renderer | None = None

    async def admit(self, server: Server) -> None:
        """Looks at a server before it is asked: special tokens (a difference aborts by name) and context."""
        equal = await check_served(server, check_loaded(folder_of(self.config.verifier)))
        self.outcome.special_tokens = "equal" if equal else "not told by the server"
        limit = await server.context()
        if limit is not None:
            self.context = min(limit, self.context or limit)
        with suppress(chat.Refused):  # an engine whose /tokenize takes text alone
            ids = await server.tokenize_chat([{"role": "user", "content": "a"}], [], {})
            self._template_tokens = max(self._template_tokens, len(ids or ()) + TEMPLATE_MARGIN)

    async def check_lengths(self, asked: Asked) -> None:
        """Measures, by the server's own tokenizer, the prompts that may not fit; records those that do not.

        No token is shorter than a byte, so a record with no more bytes than there is room fits.
        """
        if self.context is None:
            return
        turn = itertools.cycle([lane.server for lane in self.fleet.lanes])
        queue = iter(asked(max(0, self.context - self.config.traces.max_tokens - self._template_tokens)))

        async def work() -> None:
            for key, prompt in queue:
                messages = next_messages(prompt, ()) or []
                template = sampling.fields(self.config.traces, prompt.key).get("chat_template_kwargs", {})
                try:
                    ids = await next(turn).tokenize_chat(messages, prompt.tools, template)
                except (chat.Refused, TransientError):
                    continue  # the request itself will tell
                if ids is not None:
                    self._lengths[prompt.key] = len(ids)
                    if self._room(len(ids)) < 1:
                        self._fail(key, f"prompt_too_long: {len(ids)} tokens, the server takes {self.context}")

        await run_workers(work, self.config.traces.concurrency)

    async def converse(self, key: str, prompt: Prompt) -> None:
        """Asks for the turns of one prompt that are not recorded yet; what goes wrong is recorded, not raised."""
        if self._room(self._lengths.get(prompt.key, 0)) < 1:
            return  # recorded by check_lengths
        turns = self.pool.turns(key)
        try:
            messages = next_messages(prompt, turns)
            while messages is not None:
                turns.append(await self._turn(prompt, turns, messages))
                messages = next_messages(prompt, turns)
                self._collect()
                self.pool.add(key, turns[-1], final=messages is None)
                self.outcome.requested += 1
                self.throughput.add(len(turns[-1].output_ids))
        except _TooLong:
            self.pool.finish(key)
        except (chat.Refused, TransientError) as error:
            if error is self.fleet.lost:
                raise
            self._fail(key, str(error))
            return
        self.outcome.answered += 1
        self._tell()

    def _collect(self) -> None:
        """Commits at once, or a moment after the last commit what arrives within that moment."""
        loop = asyncio.get_running_loop()
        if not self.pool.collecting and loop.time() < self._committed + COMMIT_EVERY_S:
            self.pool.begin()
            loop.call_at(self._committed + COMMIT_EVERY_S, self._commit)
        elif not self.pool.collecting:
            self._committed = loop.time()

    def _commit(self) -> None:
        self._committed = asyncio.get_running_loop().time()
        self.pool.commit()

    async def _turn(self, prompt: Prompt, turns: Sequence[Trace], messages: Sequence[Message]) -> Trace:
        fields = sampling.fields(self.config.traces, prompt.key, len(turns))
        fields |= tool_fields(prompt, self.config.verifier.tool_call_parser is not None)
        template = fields.get("chat_template_kwargs", {})
        known = None if turns else self._lengths.get(prompt.key)

        async def ask(server: Server) -> Answer:
            length = known
            if turns and not self._settled(messages, prompt):
                ids = await server.tokenize_chat(messages, prompt.tools, template)
                length = None if ids is None else len(ids)
            room = self._room(length or 0)
            if room < 1:
                raise _TooLong
            return await server.chat(messages, prompt.tools, fields | {"max_tokens": room})

        answer, server = await self.fleet.send(ask, self.config.traces.max_attempts)
        prompt_ids, output_ids, ids = answer.prompt_ids, answer.output_ids, SERVER
        if prompt_ids is None or output_ids is None:
            self._renderer = self._renderer or await renderer_for(server, self.config.verifier)
            prompt_ids, output_ids, ids = await rebuild(self._renderer, messages, prompt.tools, template, answer)
        return Trace.of(answer, prompt.key, len(turns), fields, prompt_ids, output_ids, ids)

    def _settled(self, messages: Sequence[Message], prompt: Prompt) -> bool:
        """Whether the bytes alone say that a full answer fits: no token is shorter than a byte."""
        if self.context is None:
            return True
        room = self.context - self.config.traces.max_tokens - self._template_tokens
        return len(json.dumps([list(messages), list(prompt.tools)])) <= room

    def _room(self, length: int) -> int:
        """Tokens of answer after a prompt of `length` tokens."""
        wanted = self.config.traces.max_tokens
        return wanted if self.context is None or not length else min(wanted, self.context - length)

    def _fail(self, key: str, reason: str) -> None:
        self.pool.fail(key, reason)
        self.outcome.failed += 1
        allowed = max(MANY_FAILURES, self.config.traces.max_rejected_share * self.total)
        self.outcome.stopped = self.outcome.failed > allowed
        self._tell()

    def _tell(self) -> None:
        outcome = self.outcome
        speed = round(self.throughput.tokens / max(self.throughput.seconds, 1e-9))
        figures = {"tokens/s": speed, "failed": outcome.failed}
        self.report(Progress(outcome.answered + outcome.failed, self.total, "prompts", figures))

    def end(self) -> Outcome:
        """The counters of the whole execution."""
        outcome = self.outcome
        outcome.output_tokens = self.throughput.tokens
        outcome.seconds = self.throughput.seconds
        outcome.retried = self.fleet.retried
        outcome.absences = sum(lane.absences for lane in self.fleet.lanes)
        outcome.backoffs = sum(lane.window.backoffs for lane in self.fleet.lanes)
        outcome.throughput = self.throughput.figures()
        return outcome
