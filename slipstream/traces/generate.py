"""Asking servers for the turns that the pool does not have yet: one async client inside one task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from slipstream import chat
from slipstream.chat import Answer, Message, Server
from slipstream.concurrent import run_async, run_workers
from slipstream.config import RunConfig
from slipstream.errors import SlipstreamError, TransientError
from slipstream.progress import Progress, Report
from slipstream.serving import Endpoint
from slipstream.special_tokens import check_loaded, check_served
from slipstream.traces import sampling
from slipstream.traces.conversation import next_messages, tool_fields
from slipstream.traces.fleet import Fleet, sailing
from slipstream.traces.pool import TracePool
from slipstream.traces.prompts import Prompt
from slipstream.traces.rebuild import Renderer, rebuild, renderer_for
from slipstream.traces.room import Room
from slipstream.traces.rules import Rules
from slipstream.traces.states import States
from slipstream.traces.throughput import Throughput
from slipstream.traces.trace import SERVER, Trace
from slipstream.verifier import THINK_CLOSE, folder_of

TEMPLATE_MARGIN = 16
MANY_FAILURES = 100  # below so many a share says little
COMMIT_EVERY_S = 0.05  # answers that arrive faster than this share a commit
Asked = Callable[[int], Iterable[tuple[str, Prompt, bool]]]


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
    special_tokens: str = "equal"
    complaints: dict[str, str] = field(default_factory=dict)  # servers that are away at the end, and why
    throughput: dict[str, Any] = field(default_factory=dict)
    states: dict[str, Any] | None = None  # what became of the hidden states, with capture_while_generating


def generate(
    asked: Asked,
    total: int,
    endpoints: Sequence[Endpoint],
    config: RunConfig,
    pool: TracePool,
    report: Report,
    states: States | None = None,
) -> Outcome:
    """Asks for every prompt that `asked` gives (`total` of them) and records each turn as it arrives.

    `asked(longer_than)` gives row keys and prompts, and whether some turn is recorded, without prompts whose record
    has no more bytes than that.  `states` takes the hidden states that come with the answers.

    Raises InputError when the server's special tokens are not the verifier's, TransientError when all servers
    stay away.  A prompt that fails is recorded with its reason and the others go on; when more have failed than
    `traces.max_rejected_share` of them allows, the rest is not asked.
    """
    return run_async(_generate(asked, total, endpoints, config, pool, report, states))


async def _generate(
    asked: Asked,
    total: int,
    endpoints: Sequence[Endpoint],
    config: RunConfig,
    pool: TracePool,
    report: Report,
    states: States | None,
) -> Outcome:
    traces = config.traces
    async with AsyncExitStack() as stack:
        reach = Server if states is None else states.server
        servers = await stack.enter_async_context(chat.connect(endpoints, traces.request_timeout_s, reach))
        generation = _Generation(config, pool, report, total, states)
        fleet = sailing(servers, traces.concurrency, traces.endpoint_patience_s, generation.admit)
        generation.fleet = await stack.enter_async_context(fleet)
        sampler = asyncio.ensure_future(generation.throughput.sample(lambda: generation.fleet.working))
        stack.callback(sampler.cancel)
        await generation.check_lengths(asked)
        queue = iter(asked(0))

        async def work() -> None:
            for key, prompt, begun in queue:
                if generation.outcome.stopped:
                    return
                await generation.converse(key, prompt, begun)

        try:
            await run_workers(work, min(traces.concurrency, total))
        finally:
            generation.settle()
            if states is not None:
                await states.settle()
        return generation.end()


class _TooLong(Exception):
    """The conversation so far leaves no room for a token of answer."""


class _Generation:
    """One execution: its counters and the steps of one prompt."""

    fleet: Fleet

    def __init__(
        self, config: RunConfig, pool: TracePool, report: Report, total: int, states: States | None = None
    ) -> None:
        self.config, self.pool, self.report, self.total, self.states = config, pool, report, total, states
        self._rules = Rules.of(config)
        self.outcome = Outcome()
        self.throughput = Throughput()
        self.room = Room(config.traces.max_tokens, config.verifier)
        self._special = check_loaded(folder_of(config.verifier))
        self._lengths: dict[str, int] = {}  # tokens of the prompts that may not fit with a full answer
        self._renderers: dict[str, Renderer] = {}
        self._committed = 0.0
        self._broken: SlipstreamError | None = None

    async def admit(self, server: Server) -> None:
        """Looks at a server before it is asked: special tokens (a difference aborts by name) and context."""
        if not await check_served(server, self._special):
            self.outcome.special_tokens = "not told by every server"
        await self.room.admit(server)

    async def check_lengths(self, asked: Asked) -> None:
        """Measures, by the server's own tokenizer, the prompts that may not fit; records those that do not."""
        self.room.fixed = True
        queue = iter(asked(self.room.settled_bytes))

        async def work() -> None:
            for key, prompt, begun in queue:
                if self.outcome.stopped:
                    return
                if begun:
                    continue  # its next turn is what has to fit
                measure = partial(
                    self.room.length,
                    messages=next_messages(prompt, ()) or [],
                    tools=prompt.tools,
                    template=sampling.template(sampling.fields(self.config.traces, prompt.key)),
                )
                try:
                    length = await self.fleet.send(measure, self.config.traces.max_attempts)
                except TransientError as error:
                    if error is self.fleet.lost:
                        raise
                    continue  # the request itself will tell
                if length is not None:
                    self._lengths[prompt.key] = length
                    if self.room.after(length) < 1:
                        self._fail(key, f"prompt_too_long: {length} tokens, the server takes {self.room.context}")

        await run_workers(work, self.config.traces.concurrency)

    async def converse(self, key: str, prompt: Prompt, begun: bool) -> None:
        """Asks for the turns of one prompt that are not recorded yet; what goes wrong is recorded, not raised."""
        if not begun and self.room.after(self._lengths.get(prompt.key, 0)) < 1:
            return  # recorded by check_lengths
        turns = self.pool.turns(key) if begun else []
        try:
            messages = next_messages(prompt, turns)
            while messages is not None and not self.outcome.stopped:
                turns.append(await self._turn(prompt, turns, messages))
                messages = next_messages(prompt, turns)
                self._collect()
                self.pool.add(key, turns[-1], final=messages is None)
                self.outcome.requested += 1
                self.throughput.add(len(turns[-1].output_ids))
        except _TooLong:
            if not turns:
                self._fail(key, f"prompt_too_long: the server takes {self.room.context}")
                return
            self.pool.finish(key)
            messages = None
        except (chat.Refused, TransientError) as error:
            if error is self.fleet.lost:
                raise
            self._fail(key, str(error))
            return
        if messages is None:
            self.outcome.answered += 1
        self._tell()

    def _collect(self) -> None:
        """Commits at once, or a moment after the last commit what arrives within that moment."""
        if self._broken is not None:
            raise self._broken
        loop = asyncio.get_running_loop()
        if not self.pool.collecting and loop.time() < self._committed + COMMIT_EVERY_S:
            self.pool.begin()
            loop.call_at(self._committed + COMMIT_EVERY_S, self._commit)
        elif not self.pool.collecting:
            self._committed = loop.time()

    def _commit(self) -> None:
        self._committed = asyncio.get_running_loop().time()
        try:
            self.pool.commit()
        except SlipstreamError as error:  # nobody waits for a timer: the next answer, or the end, raises it
            self._broken = self._broken or error

    def settle(self) -> None:
        """Commits what is collected; raises what a commit raised."""
        self._commit()
        if self._broken is not None:
            raise self._broken

    async def _turn(self, prompt: Prompt, turns: Sequence[Trace], messages: Sequence[Message]) -> Trace:
        fields = sampling.fields(self.config.traces, prompt.key, len(turns))
        fields |= tool_fields(prompt, self.config.verifier.tool_call_parser is not None)
        known = None if turns else self._lengths.get(prompt.key)

        async def ask(server: Server) -> Trace:
            template = sampling.template(fields)
            if known is None:
                room = await self.room.tokens(server, messages, prompt.tools, template)
            else:
                room = self.room.after(known)
            if room < 1:
                raise _TooLong
            asked = fields | {"max_tokens": room}
            answer = await server.chat(messages, prompt.tools, asked)
            prompt_ids, output_ids, ids = answer.prompt_ids, answer.output_ids, SERVER
            if prompt_ids is None or output_ids is None:
                renderer = await self._renderer(server)
                prompt_ids, output_ids, ids = await rebuild(renderer, messages, prompt.tools, template, answer)
            trace = Trace.of(
                self._open(answer, asked, output_ids), prompt.key, len(turns), asked, prompt_ids, output_ids, ids
            )
            if self.states is not None:
                usable = all(self._rules.rejection(turn) is None for turn in (*turns, trace))
                self.states.take(server, answer.states_file, trace.input_ids if usable else None)
            return trace

        return await self.fleet.send(ask, self.config.traces.max_attempts, lambda trace: len(trace.output_ids))

    def _open(self, answer: Answer, asked: Mapping[str, Any], output_ids: Sequence[int]) -> Answer:
        """Thinking that was cut is thinking, also where a server without a reasoning parser returned it as content."""
        close = self._special.get(THINK_CLOSE)
        thinks = self.config.traces.reasoning and not sampling.told_not_to_think(asked)
        if answer.finish_reason != "length" or not thinks or not answer.answer or close in output_ids:
            return answer
        return replace(answer, thinking=(answer.thinking or "") + answer.answer, answer=None)

    async def _renderer(self, server: Server) -> Renderer:
        url = server.endpoint.url
        if url not in self._renderers:
            self._renderers[url] = await renderer_for(server, self.config.verifier)
        return self._renderers[url]

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
        outcome.complaints = {
            lane.server.endpoint.url: lane.complaint for lane in self.fleet.lanes if lane.away and lane.complaint
        }
        outcome.throughput = self.throughput.figures()
        outcome.states = None if self.states is None else self.states.figures()
        return outcome
