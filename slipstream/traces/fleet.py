"""Several servers as one: the least loaded takes the next request, a dead one is left and its work moves on.

This is the only place that repeats a request.  What counts as an attempt: a refusal (429, 503, another 5xx), a
timeout, a broken connection of a server that lives.  What does not: the server went away; then the request moves to
another one, at most MOVES times.  So one prompt waits at most `attempts` timeouts and back-offs.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from slipstream.chat import Answer, Overloaded, Refused, Server, Unreachable
from slipstream.errors import SlipstreamError, TransientError
from slipstream.traces.window import Window

MOVES = 10
BACK_OFF_S = 30.0
WATCH_S, LOOK_AGAIN_S = 10.0, 1.0
MISSES = 3  # probes in a row that a server may miss under load before it counts as gone

T = TypeVar("T")
Admit = Callable[[Server], Awaitable[None]]


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
        self._waiting: set[asyncio.Task[Any]] = set()
        self._sent_away: set[asyncio.Task[Any]] = set()
        self._probe: asyncio.Task[bool] | None = None

    @property
    def away(self) -> bool:
        """Whether it gets no work now."""
        return self.left.is_set()

    @property
    def free(self) -> bool:
        """Whether it can take another request."""
        return not self.away and self.in_flight < self.window.limit

    async def run(self, request: Awaitable[T]) -> T:
        """Awaits a request; raises _Gone when the server left meanwhile (`leave` cancels whoever waits here)."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            return await request
        except asyncio.CancelledError:
            if task not in self._sent_away or task.uncancel() > 0:
                raise
            raise _Gone from None
        finally:
            self._waiting.discard(task)
            self._sent_away.discard(task)

    async def probe(self) -> bool:
        """Whether the server lives; many who ask at once share one probe."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self.server.alive())
        return await asyncio.shield(self._probe)

    def leave(self) -> None:
        """Gives the server no more work and takes back what it has."""
        if self.away:
            return
        self.left.set()
        self.absences += 1
        self._sent_away |= self._waiting
        for task in self._waiting:
            task.cancel()


class Fleet:
    """The servers of one generation; made by `sailing`.

    `lost` is set when nothing more can be asked: all servers stayed away, or one came with the wrong tokenizer.
    """

    def __init__(self, servers: Sequence[Server], maximum: int, patience_s: float, admit: Admit) -> None:
        self.lanes = [Lane(server, maximum) for server in servers]
        self.retried = 0
        self.lost: SlipstreamError | None = None
        self._patience_s = patience_s
        self._admit = admit
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def send(self, ask: Callable[[Server], Coroutine[Any, Any, Answer]], attempts: int) -> tuple[Answer, Server]:
        """The answer to one request and who gave it.

        Raises Refused at once, TransientError after `attempts` attempts, and `lost` when that is set.
        """
        made = moves = 0
        while True:
            lane = await self._board()
            try:
                answer = await lane.run(ask(lane.server))
                lane.window.answered(len(answer.output_ids or ()) or (answer.usage or (0, 0))[1])
                return answer, lane.server
            except _Gone as error:
                failure: TransientError = Unreachable(f"connection: {lane.server.endpoint.url} went away")
                failure.__cause__ = error
                gone = True
            except Unreachable as error:
                failure, gone = error, not await lane.probe()
                if gone:
                    lane.leave()
            except TransientError as error:
                failure, gone = error, False
                if isinstance(error, Overloaded):
                    lane.window.refused()
            finally:
                lane.in_flight -= 1
                self._wake(max(1, lane.window.limit - lane.in_flight))  # the window may have grown
            made, moves = (made, moves + 1) if gone else (made + 1, moves)
            if made >= attempts or moves > MOVES:
                raise failure
            self.retried += 1
            if not gone:
                await asyncio.sleep(_pause(failure, made))

    async def _board(self) -> Lane:
        """Waits for a free lane and takes a place on the least loaded one."""
        while True:
            if self.lost is not None:
                raise self.lost
            if free := [lane for lane in self.lanes if lane.free]:
                lane = min(free, key=lambda candidate: candidate.in_flight)
                lane.in_flight += 1
                lane.window.used(lane.in_flight)
                return lane
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    def _wake(self, count: int | None = None) -> None:
        """Lets so many of those who wait look again; all by default."""
        count = len(self._waiting) if count is None else count
        while self._waiting and count > 0:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else its owner was cancelled
                waiter.set_result(None)
                count -= 1

    async def watch(self) -> None:
        """Looks after the servers for ever: who left, who came back, whether anybody is left."""
        async with asyncio.TaskGroup() as group:
            for lane in self.lanes:
                group.create_task(self._watch(lane))
            group.create_task(self._count_the_absent())

    async def enter(self, lane: Lane) -> bool:
        """Lets a server take part when it lives and is admitted; whether it does."""
        try:
            if not await lane.probe():
                return False
            await self._admit(lane.server)
        except (TransientError, Refused):
            return False
        except SlipstreamError as error:
            self.lost = error
        lane.left.clear()
        self._wake()
        return True

    async def _watch(self, lane: Lane) -> None:
        misses = 0
        while True:
            if lane.away:
                await asyncio.sleep(LOOK_AGAIN_S)
                await self.enter(lane)
                misses = 0
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(lane.left.wait(), WATCH_S)
                continue
            if await lane.probe():
                misses = 0
            else:
                misses += 1
                if misses >= MISSES:
                    lane.leave()

    async def _count_the_absent(self) -> None:
        clock = asyncio.get_running_loop().time
        seen = clock()
        while True:
            await asyncio.sleep(min(LOOK_AGAIN_S, self._patience_s / 4))
            if not all(lane.away for lane in self.lanes):
                seen = clock()
            elif clock() - seen > self._patience_s:
                names = ", ".join(lane.server.endpoint.url for lane in self.lanes)
                self.lost = TransientError(f"{names}: away for {self._patience_s:.0f} s; what was answered is kept")
                self._wake()


def _pause(error: TransientError, attempt: int) -> float:
    """Seconds before another attempt: full jitter over 1, 2, 4 … 30 s, not sooner than the server wishes."""
    wish = (error.retry_after_s or 0.0) if isinstance(error, Overloaded) else 0.0
    return min(wish, BACK_OFF_S) + random.uniform(0, min(BACK_OFF_S, 2.0 ** (attempt - 1)))


@asynccontextmanager
async def sailing(servers: Sequence[Server], maximum: int, patience_s: float, admit: Admit) -> AsyncIterator[Fleet]:
    """A fleet that is looked after until the block ends; `maximum` requests in flight at each server at most.

    `admit` looks at a server before it gets its first request, and again when it comes back; it raises a
    SlipstreamError that is not transient to end everything.  A server that is away at the start may come later.
    """
    fleet = Fleet(servers, maximum, patience_s, admit)
    for lane in fleet.lanes:
        if not await fleet.enter(lane):
            lane.leave()
    if fleet.lost is not None:
        raise fleet.lost
    watch = asyncio.ensure_future(fleet.watch())
    try:
        yield fleet
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
