"""Capturing hidden states through vLLM: one prefill request a sample, paired by token ids, never by order.

What becomes of a row when something fails:

* its sample is wrong (other tokens, too short, NaN) or its file does not come: asked for again, `max_attempts` times
  in all, then lost with the reason;
* the disk is full, here or at the server: nothing new is sent until there is room, and the row is asked for again;
* a server that was started here dies: another one is started, `max_server_restarts` times;
* an endpoint that the user named goes away: it is waited for, and others take over meanwhile;
* it was in flight when a server went away: it is captured last, alone.  When that server goes away too, the row is
  what ends servers: it is lost by name and takes no neighbours along.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slipstream import chat
from slipstream.chat import Refused, Server, Unreachable
from slipstream.concurrent import run_async, run_workers
from slipstream.config import FeaturesConfig
from slipstream.errors import ServerError, SlipstreamError, TransientError
from slipstream.features.disk import Disk, DiskFull, NoRoom, is_full
from slipstream.features.extraction import ExtractionServer, NoFile
from slipstream.features.lease import Lease, Lend
from slipstream.features.pool import FeaturePool
from slipstream.features.sample import BadSample
from slipstream.progress import Progress, Report
from slipstream.traces.fleet import Fleet, sailing

INGEST_THREADS = min(16, max(2, (os.cpu_count() or 1) // 2))  # one checks 1.5 to 3 GB/s
WATCH_EVERY_S = 0.2
TELL_EVERY_S = 1.0
OWN_PATIENCE_S = 30.0  # a server of ours that nobody reaches for so long is dead, whatever its process says
AWAITED = 2  # times `concurrency`: as many samples as wait for an answer may wait for their file or be checked
HEADER_BYTES = 1024  # of a sample's file, at most


@dataclass
class Outcome:
    """What a capture did.

    `lost` rows with the reason, `suspects` rows that were in flight when a server went away, `paused_s` seconds
    without room on a disk, `vllm` the version of the servers (None for one that does not tell).
    """

    captured: int = 0
    tokens: int = 0
    lost: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    restarts: int = 0
    suspects: set[int] = field(default_factory=set)
    paused_s: float = 0.0
    vllm: str | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens captured a second."""
        return round(self.tokens / self.seconds, 1) if self.seconds else None


class ServerDied(ServerError):
    """A server that was started here ended, or answers nothing any more."""


class _Suspect(SlipstreamError):
    """This row was in flight when a server went away."""


def capture(
    rows: Sequence[tuple[int, Sequence[int]]],
    lend: Lend,
    pool: FeaturePool,
    config: FeaturesConfig,
    report: Report,
) -> Outcome:
    """Captures `rows` (row number, token ids) and moves each sample into the pool as it arrives.

    Every time `lend` is entered it gives a server that lives.  Raises ServerError when servers died more often than
    `max_server_restarts`, TransientError when named endpoints stayed away or a disk stayed full for too long.  What
    was captured until then is in the pool.
    """
    return _Capture(rows, pool, config, report).run(lend)


class _Capture:
    """One execution: what is left to do, over the life of several servers."""

    _lease: Lease
    _fleet: Fleet
    _threads: ThreadPoolExecutor

    def __init__(
        self, rows: Sequence[tuple[int, Sequence[int]]], pool: FeaturePool, config: FeaturesConfig, report: Report
    ) -> None:
        self._rows, self._left = dict(rows), dict.fromkeys(number for number, _ in rows)
        self._pool, self._config, self._report = pool, config, report
        self._disk = Disk(pool.folder, config.disk_reserve_gib, config.disk_patience_s)
        self._exposed: set[int] = set()  # rows in flight, or that were when a server went away
        self._suspects: dict[int, None] = {}  # rows to be captured alone, in this order
        self._absences: Counter[int] = Counter()  # how often the server went away while it had this row alone
        self._stored_at = 0.0
        self._began = 0.0  # of the session with the present servers; 0 outside
        self.outcome = Outcome()

    def run(self, lend: Lend) -> Outcome:
        """Goes on from server to server until no row is left."""
        with ThreadPoolExecutor(INGEST_THREADS, "features-ingest") as self._threads:
            while self._left:
                entered = False
                try:
                    run_async(self._told(self._disk.wait()))
                    with lend() as lease:
                        entered = True
                        run_async(self._told(self._session(lease)))
                except ServerDied as death:
                    self._go_on_after(death)
                except ServerError as error:
                    if entered or not self.outcome.restarts:
                        raise
                    self._go_on_after(error)  # the one that took a dead one's place did not start
                finally:
                    self.outcome.paused_s = round(self._disk.paused_s, 1)
        return self.outcome

    def _go_on_after(self, death: ServerError) -> None:
        if not self._left:
            return
        if self._disk.shortage() is None:  # a full disk ends servers as well; that is no row's fault
            self._suspect(*(number for number in self._left if number in self._exposed))
            if self.outcome.restarts >= self._config.max_server_restarts:
                raise ServerError(
                    f"{death}; servers died more often than features.max_server_restarts "
                    f"{self._config.max_server_restarts} allows: see the log; {self.outcome.captured} captured samples "
                    f"are kept, {len(self._left)} are left"
                ) from death
            self.outcome.restarts += 1
        self._exposed.clear()

    def _suspect(self, *numbers: int) -> None:
        self._suspects |= dict.fromkeys(numbers)
        self.outcome.suspects |= set(numbers)

    async def _session(self, lease: Lease) -> None:
        """Captures what is left as long as these servers live."""
        self._lease = lease
        self._disk.watch(lease.storage)
        patience = OWN_PATIENCE_S if lease.owned else self._config.endpoint_patience_s
        self._began = time.monotonic()
        try:
            async with AsyncExitStack() as stack:
                session = await stack.enter_async_context(chat.session(self._config.request_timeout_s))
                servers = [
                    ExtractionServer(endpoint, session, lease.storage, self._config.concurrency)
                    for endpoint in lease.endpoints
                ]
                for server in servers:
                    stack.callback(server.close)
                in_flight = AWAITED * self._config.concurrency
                fleet = sailing(servers, in_flight, patience, self._admit)
                self._fleet = await stack.enter_async_context(fleet)
                watch = asyncio.ensure_future(self._watch())
                stack.callback(watch.cancel)
                await self._capture(len(servers) * in_flight)
                await asyncio.gather(*(server.settle() for server in servers))
        except TransientError as error:
            if lease.owned and error is self._fleet.lost:
                raise ServerDied(str(error)) from error
            raise
        finally:
            self.outcome.seconds += time.monotonic() - self._began
            self._began = 0.0

    async def _capture(self, workers: int) -> None:
        queue = iter([number for number in self._left if number not in self._suspects])

        async def work() -> None:
            for number in queue:
                await self._row(number)

        await run_workers(work, min(workers, len(self._left)))
        while self._suspects:
            number = next(iter(self._suspects))
            del self._suspects[number]
            self._exposed.discard(number)
            try:
                await self._row(number, alone=True)
            except SlipstreamError as error:
                had_it = self._lease.owned and number in self._exposed
                if had_it and error is self._fleet.lost and self._disk.shortage() is None:
                    self._lose(number, f"the server died while it had this row alone: {error}")
                else:
                    self._suspect(number)
                raise

    async def _row(self, number: int, alone: bool = False) -> None:
        """Captures one row, or finds that it is lost or a suspect."""
        tokens = len(self._rows[number])
        size = tokens * (self._pool.form.bytes_per_token + 8) + HEADER_BYTES
        again = alone
        while True:
            try:
                async with self._disk.room(size):
                    if not (again and await self._is_stored(number)):
                        await self._fleet.send(partial(self._ask, number), self._config.max_attempts, lambda _: tokens)
            except NoRoom:
                raise
            except DiskFull:
                self._disk.met_full()
                again = True
                continue
            except _Suspect:
                if not alone:
                    self._suspect(number)
                    return
                self._absences[number] += 1
                self._exposed.discard(number)
                if self._absences[number] < self._config.max_attempts:
                    continue
                self._lose(number, f"the server went away {self._absences[number]} times while it had this row alone")
                return
            except (Refused, ServerError, TransientError) as error:
                if error is self._fleet.lost:
                    raise
                self._lose(number, str(error))
                return
            del self._left[number]
            self.outcome.captured += 1
            self.outcome.tokens += tokens
            self._tell()
            return

    def _lose(self, number: int, reason: str) -> None:
        del self._left[number]
        self.outcome.lost[number] = reason
        self._tell()

    async def _ask(self, number: int, server: Server) -> None:
        """One attempt at one server, counted by the fleet when it raises TransientError."""
        assert isinstance(server, ExtractionServer)
        if number in self._exposed:
            raise _Suspect
        self._exposed.add(number)
        sent, token_ids = time.monotonic(), self._rows[number]
        try:
            async with server.sample(token_ids, self._config.request_timeout_s) as written:
                await self._store(token_ids, written.path)
        except Unreachable as error:
            await self._acquit(number, server)
            if self._disk.shortage() is not None:  # a server without room for its lock file answers 500
                raise DiskFull(str(error)) from error
            raise
        except (BadSample, NoFile) as error:
            if self._disk.shortage() is not None:  # half a file, or none
                self._exposed.discard(number)
                raise DiskFull(str(error)) from error
            await self._look_for_silence(server, sent)
            await self._acquit(number, server)  # a server that is killed leaves half a file, too
            raise TransientError(str(error)) from error
        except (Refused, ServerError, TransientError, DiskFull):
            await self._look_for_silence(server, sent)
            self._exposed.discard(number)
            raise
        self._exposed.discard(number)
        self._stored_at = time.monotonic()
        self._disk.wrote()

    async def _acquit(self, number: int, server: ExtractionServer) -> None:
        """The row failed while its server lives, so it is no suspect; raises Unreachable when the server does not."""
        if await server.alive() is False:
            raise Unreachable(f"{server.endpoint.url}: went away")
        self._exposed.discard(number)

    async def _look_for_silence(self, server: ExtractionServer, sent: float) -> None:
        """A server of ours that let a request time out and then gives no single token either is as good as dead."""
        timeout_s, asked = self._config.request_timeout_s, time.monotonic()
        if not self._lease.owned or asked - sent < 0.9 * timeout_s:  # timers of the event loop run a little early
            return
        try:
            async with asyncio.timeout(timeout_s / 2):
                await server.flush()
        except TimeoutError:
            if self._stored_at < asked:
                self._end(ServerDied(f"{server.endpoint.url}: hangs, gave nothing for {time.monotonic() - sent:.0f} s"))
                await asyncio.sleep(0)  # here this request is taken back, like all others
        except SlipstreamError:
            return  # it answers, or its end is noticed elsewhere

    def _end(self, death: ServerDied) -> None:
        """Gives the servers up and takes back what they had."""
        self._fleet.lose(death)
        for lane in self._fleet.lanes:
            lane.leave()

    async def _store(self, token_ids: Sequence[int], path: Path) -> None:
        """Checks the file and moves it into the pool; what has begun is finished, whatever happens to the server."""
        added = asyncio.get_running_loop().run_in_executor(self._threads, self._pool.add, token_ids, path)
        try:
            await asyncio.shield(added)
        except asyncio.CancelledError:
            await asyncio.wait([added])
            raise
        except Exception as error:
            if is_full(error):
                raise DiskFull(str(error)) from error
            if isinstance(error, OSError):
                raise TransientError(f"{path}: {error.strerror}") from error
            raise

    async def _is_stored(self, number: int) -> bool:
        """Whether the pool has the row all the same: it was moved in while the server died or the disk was full."""
        found = asyncio.get_running_loop().run_in_executor(self._threads, self._pool.find, self._rows[number])
        try:
            return await found is not None
        except Exception as error:
            if is_full(error):
                raise DiskFull(str(error)) from error
            raise

    async def _admit(self, server: Server) -> None:
        assert isinstance(server, ExtractionServer)
        await server.context()  # raises when it serves another model
        self.outcome.vllm = await server.version()

    async def _watch(self) -> None:
        """Notices at once that a server of ours has ended, and takes back what it had."""
        while (complaint := self._lease.complaint()) is None:
            await asyncio.sleep(WATCH_EVERY_S)
        self._end(ServerDied(complaint))

    async def _told(self, work: Coroutine[Any, Any, None]) -> None:
        """Does `work` and meanwhile tells of pauses, in which no sample arrives that would tell of itself."""

        async def tell() -> None:
            while True:
                await asyncio.sleep(TELL_EVERY_S)
                if self._disk.waiting or self._away():
                    self._tell()

        telling = asyncio.ensure_future(tell())
        try:
            await work
        finally:
            telling.cancel()

    def _away(self) -> list[str]:
        fleet = getattr(self, "_fleet", None)
        return [] if fleet is None else [lane.server.endpoint.url for lane in fleet.lanes if lane.away]

    def _tell(self) -> None:
        outcome = self.outcome
        seconds = outcome.seconds + (time.monotonic() - self._began if self._began else 0)
        figures: dict[str, float | int | str] = {
            "tokens/s": round(outcome.tokens / max(seconds, 1e-9)),
            "lost": len(outcome.lost),
        }
        if outcome.restarts:
            figures["restarts"] = outcome.restarts
        if self._disk.waiting:
            figures["paused"] = self._disk.waiting
        if away := self._away():
            figures["waiting for"] = " ".join(away)
        self._report(Progress(outcome.captured + len(outcome.lost), len(self._rows), "samples", figures))
