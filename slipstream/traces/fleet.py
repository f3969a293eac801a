"""Several servers as one: the least loaded takes the next request, a dead one is left and its work moves on.

This is the only place that repeats a request.  What counts as an attempt: a 5xx, a timeout, a broken connection of a
server that lives.  A refusal (429, 503) counts a tenth of one.  A server that went away costs none; then the request
moves to another one, at most MOVES times.  So one prompt takes at most `attempts` timeouts and their back-offs.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from slipstream.chat import Overloaded, Refused, Server, Unreachable
from slipstream.errors import InputError, ServerError, SlipstreamError, TransientError
from slipstream.traces.window import Window

T = TypeVar("T")
Admit = Callable[[Server], Awaitable[None]]
MOVES = 10
REFUSALS_AN_ATTEMPT = 10
BACK_OFF_S = 30.0
IN_A_ROW = 3  # refusals after which the server rests, not only the request that met one
WATCH_S, LOOK_AGAIN_S = 10.0, 1.0
MOMENT_S = 5.0  # a refusal takes less
MISSES = 3  # probes in a row without an answer in time that a busy server may have


class _Gone(Exception):
    """The server went away while it had this request."""


class Lane:
    """One server with its window and what is in flight on it."""

    def __init__(self, server: Server, maximum: int) -> None:
        self.server = server
        self.window = Window(maximum)
        self.in_flight = 0
        self.left = asyncio.Event()
        self.absences = 0
        self.complaint = ""  # why it does not take part
        self.refused = False  # it is the wrong one: another model, a smaller context
        self.refusals = 0  # moments in a row in which it refused
        self.boarded_at = 0.0  # when the newest request in flight was sent
        self._rests_until = 0.0
        self._holders: set[asyncio.Task[Any]] = set()
        self._sent_away: set[asyncio.Task[Any]] = set()
        self._probe: asyncio.Task[bool | None] | None = None

    @property
    def away(self) -> bool:
        """Whether it gets no work now."""
        return self.left.is_set()

    @property
    def free(self) -> bool:
        """Whether it can take another request."""
        return not self.away and not self.resting and self.in_flight < self.window.limit

    @property
    def resting(self) -> bool:
        """Whether it refused so often that it is left alone for a while."""
        return self._rests_until > asyncio.get_running_loop().time()

    @property
    def present(self) -> bool:
        """Whether it answers, as far as one can tell: neither away nor refusing everything."""
        waits = self.in_flight > 0 and asyncio.get_running_loop().time() - self.boarded_at > MOMENT_S
        return not self.away and (self.refusals < IN_A_ROW or waits)

    async def run(self, request: Awaitable[T]) -> T:
        """Awaits a request; raises _Gone when the server left meanwhile (`leave` cancels whoever waits here)."""
        task = asyncio.current_task()
        assert task is not None
        self._holders.add(task)
        try:
            return await request
        except asyncio.CancelledError:
            if task not in self._sent_away or task.uncancel() > 0:
                raise
            raise _Gone from None
        finally:
            self._holders.discard(task)
            self._sent_away.discard(task)

    async def probe(self) -> bool | None:
        """`Server.alive`; many who ask at once share one probe."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self.server.alive())
        return await asyncio.shield(self._probe)

    def rest(self, seconds: float) -> None:
        """Gives it no new work for so long, if not for longer already."""
        self._rests_until = max(self._rests_until, asyncio.get_running_loop().time() + seconds)

    def answered(self) -> None:
        """It takes work: earlier refusals are forgotten."""
        self.refusals, self._rests_until = 0, 0.0

    def leave(self) -> None:
        """Gives the server no more work and takes back what it has."""
        if self.away:
            return
        self.left.set()
        self.absences += 1
        self._sent_away |= self._holders
        for task in self._holders:
            task.cancel()


class Fleet:
    """The servers of one generation; made by `sailing`.

    `lost` is set when nothing more can be asked: all servers stayed away, or refused everything, for too long.
    Who waits for a free lane is served in order; a place that comes free is handed over, so nobody overtakes.
    """

    def __init__(self, servers: Sequence[Server], maximum: int, patience_s: float, admit: Admit) -> None:
        self.lanes = [Lane(server, maximum) for server in servers]
        self.retried = 0
        self.lost: SlipstreamError | None = None
        self._patience_s = patience_s
        self._admit = admit
        self._queue: deque[asyncio.Future[Lane]] = deque()

    @property
    def working(self) -> bool:
        """Whether any server has a request now."""
        return any(lane.in_flight for lane in self.lanes)

    async def send(
        self, ask: Callable[[Server], Coroutine[Any, Any, T]], attempts: int, tokens: Callable[[T], int] | None = None
    ) -> T:
        """The outcome of `ask` at one of the servers; `tokens` says how many it generated, which steers the window.

        Raises Refused at once, TransientError after `attempts` attempts, and `lost` when that is set.
        """
        made = refused = moves = 0
        while True:
            lane = await self._board()
            gone, pause = False, 0.0
            try:
                if lane.away:  # it left between handing out this place and now
                    raise _Gone
                outcome = await lane.run(ask(lane.server))
                lane.answered()
                if tokens is not None:
                    lane.window.answered(tokens(outcome))
                return outcome
            except _Gone as error:
                failure: TransientError = Unreachable(f"connection: {lane.server.endpoint.url} went away")
                failure.__cause__ = error
                gone = True
            except Unreachable as error:
                failure, gone = error, await lane.probe() is False
                if gone:
                    lane.leave()
                elif isinstance(error, Overloaded):
                    refused += 1
                    pause = self._refused(lane, error, refused)
            except TransientError as error:
                failure = error
            finally:
                lane.in_flight -= 1
                self._seat()
            if gone:
                moves += 1
            elif not isinstance(failure, Overloaded):
                made += 1
                pause = _jitter(made)
            if made >= attempts or refused >= REFUSALS_AN_ATTEMPT * attempts or moves > MOVES:
                raise failure
            self.retried += 1
            await asyncio.sleep(pause)

    def _refused(self, lane: Lane, error: Overloaded, refused: int) -> float:
        """Seconds that the request waits; when the server keeps refusing it rests instead, and others take over."""
        lane.window.refused(lane.in_flight)
        lane.complaint = str(error)
        wish = min(error.retry_after_s or 0.0, BACK_OFF_S)
        if lane.resting:
            lane.rest(wish)
            return 0.0
        lane.refusals += 1
        if lane.refusals < IN_A_ROW:
            return wish + _jitter(refused)
        seconds = wish + _jitter(lane.refusals - IN_A_ROW + 1)
        lane.rest(seconds)
        asyncio.get_running_loop().call_later(seconds + 0.001, self._seat)
        return 0.0

    async def _board(self) -> Lane:
        """A place on the least loaded lane, in order of asking."""
        if self.lost is not None:
            raise self.lost
        place: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        self._seat()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                place.result().in_flight -= 1
                self._seat()
            raise

    def _seat(self) -> None:
        """Hands free places to those who wait; tells them when there will be none."""
        while self._queue:
            if self._queue[0].done():  # its owner was cancelled
                self._queue.popleft()
            elif self.lost is not None:
                self._queue.popleft().set_exception(self.lost)
            elif free := [lane for lane in self.lanes if lane.free]:
                lane = min(free, key=lambda candidate: candidate.in_flight)
                lane.in_flight += 1
                lane.boarded_at = asyncio.get_running_loop().time()
                lane.window.used(lane.in_flight)
                self._queue.popleft().set_result(lane)
            else:
                return

    def lose(self, error: SlipstreamError) -> None:
        """Ends everything with this error."""
        self.lost = self.lost or error
        self._seat()

    async def watch(self) -> None:
        """Looks after the servers for ever: who left, who came back, whether anybody is left."""
        async with asyncio.TaskGroup() as group:
            for lane in self.lanes:
                group.create_task(self._watch(lane))
            group.create_task(self._count_the_absent())

    async def enter(self, lane: Lane) -> bool:
        """Lets a server take part when it lives and is admitted; whether it does.

        Raises InputError when it is the wrong one altogether.
        """
        try:
            if await lane.probe() is not True:
                lane.complaint = "does not answer"
                return False
            await self._admit(lane.server)
        except InputError:
            raise
        except Exception as error:  # whatever a server sends, it must not end the watch over the others
            lane.complaint = str(error)
            lane.refused = isinstance(error, Refused)
            return False
        lane.left.clear()
        lane.answered()
        lane.complaint, lane.refused = "", False
        self._seat()
        return True

    async def _watch(self, lane: Lane) -> None:
        misses = 0
        while True:
            if lane.away:
                await asyncio.sleep(LOOK_AGAIN_S)
                try:
                    await self.enter(lane)
                except InputError as error:  # it came back with another tokenizer: the others go on without it
                    lane.complaint = str(error)
                misses = 0
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):  # wait_for of Python 3.11 can swallow a cancellation here
                    await lane.left.wait()
                continue
            alive = await lane.probe()
            misses = 0 if alive else misses + 1
            if alive is False or misses >= MISSES:
                lane.leave()

    async def _count_the_absent(self) -> None:
        clock = asyncio.get_running_loop().time
        seen = clock()
        while True:
            await asyncio.sleep(min(LOOK_AGAIN_S, self._patience_s / 4))
            if any(lane.present for lane in self.lanes):
                seen = clock()
            elif clock() - seen > self._patience_s:
                self.lose(
                    TransientError(f"{self.complaints()}: for {self._patience_s:.0f} s; what was answered is kept")
                )

    def complaints(self) -> str:
        """Every server and why it does not take part."""
        return "; ".join(f"{lane.server.endpoint.url}: {lane.complaint or 'is away'}" for lane in self.lanes)


def _jitter(attempt: int) -> float:
    """Seconds before another attempt: full jitter over 1, 2, 4 … 30 s."""
    return random.uniform(0, min(BACK_OFF_S, 2.0 ** min(attempt - 1, 5)))


@asynccontextmanager
async def sailing(servers: Sequence[Server], maximum: int, patience_s: float, admit: Admit) -> AsyncIterator[Fleet]:
    """A fleet that is looked after until the block ends; `maximum` requests in flight at each server at most.

    `admit` looks at a server before it gets its first request, and again when it comes back.  It raises InputError,
    which at the start ends everything, or another SlipstreamError to keep it out.  A server that is away at the start
    may come later.
    """
    fleet = Fleet(servers, maximum, patience_s, admit)
    for lane, entered in zip(fleet.lanes, await asyncio.gather(*map(fleet.enter, fleet.lanes)), strict=True):
        if not entered:
            lane.leave()
    if all(lane.refused for lane in fleet.lanes):
        raise ServerError(f"no server can be used: {fleet.complaints()}")
    watch = asyncio.ensure_future(fleet.watch())
    watch.add_done_callback(lambda task: _unwatched(fleet, task))
    try:
        yield fleet
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await watch


def _unwatched(fleet: Fleet, watch: asyncio.Task[None]) -> None:
    if not watch.cancelled() and (error := watch.exception()) is not None:
        fleet.lose(TransientError(f"the watch over the servers failed ({error!r}); what was answered is kept"))
