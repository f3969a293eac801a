"""One extraction server: a prefill request, the file that its answer names, and when that file is complete.

vLLM's connector makes `<file>.lock` and locks it before it answers, writes the file, and lets go of the lock.  So

* lock held: the file is still to come.  An idle engine hands a finished request to the writer only at its next step
  (vLLM 0.26): when nothing else is in flight, one more token is asked for.
* lock free, no file: the writer failed.  That is a failure at once, not after `request_timeout_s`.
* no lock, no file: a server without locks, or a shared file system that does not show them yet; time decides.

Requests carry a name that says which process asked (vLLM names files after it), so that what a killed client never
fetched can be told from what others still wait for.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from slipstream.chat import ASIDE, PROBE_S, Server, Unreachable
from slipstream.errors import ServerError, SlipstreamError, TransientError
from slipstream.serving import Endpoint

FIRST_LOOK_S, LAST_LOOK_S = 0.002, 0.05  # files mostly come within milliseconds; 64 that do not cost 1 % of a CPU
IDLE_S = 0.1  # an idle engine that has not written a file by then is asked for a step
FLUSH_EVERY_S = 2.0
SETTLE_S = 1.0
DEAD_ENGINE = 503  # vLLM's /health when the engine died and the API server has not ended yet
_numbers = itertools.count()


class NoFile(TransientError):
    """The server answered 200 and its file will not come."""


@dataclass(frozen=True)
class Written:
    """A complete file with the states of one request, and the server's whole answer."""

    path: Path
    answer: dict[str, Any]


class ExtractionServer(Server):
    """A server that writes hidden states into `storage`; a path that it names is used only inside that folder.

    At most `concurrency` requests wait for an answer at a time; how many files are awaited is the caller's affair.
    """

    def __init__(
        self, endpoint: Endpoint, session: aiohttp.ClientSession, storage: Path, concurrency: int = 1 << 16
    ) -> None:
        super().__init__(endpoint, session)
        self._slots = asyncio.Semaphore(concurrency)
        self._storage = Path(os.path.realpath(storage))
        self._asking = 0  # requests without an answer yet
        self._answers = 0
        self._flush: asyncio.Task[None] | None = None
        self._strays: set[Path] = set()  # what the server writes for nobody, until it is there and removed
        self._unanswered: set[str] = set()  # requests whose answer never came, though their file may have

    @asynccontextmanager
    async def sample(self, token_ids: Sequence[int], timeout_s: float, **fields: object) -> AsyncIterator[Written]:
        """The file with the states of `token_ids`, complete; whatever is left of it is removed at the block's end.

        `fields` are vLLM's request fields beside the prompt.  Raises NoFile when the file does not come within
        `timeout_s` or the writer failed, ServerError when the answer breaks the contract, and what `Server` raises for
        the request.
        """
        began = time.monotonic()
        answer = await self._prefill(token_ids, fields)
        async with self._fetched(self._named(answer), began, timeout_s) as path:
            yield Written(path, answer)

    @asynccontextmanager
    async def _fetched(self, path: Path, began: float, timeout_s: float) -> AsyncIterator[Path]:
        try:
            await self._written(path, began, timeout_s)
            yield path
        finally:
            if _Lock.of(path).held:
                self._strays.add(path)  # nobody waits any more, and its writer is still at it
            else:
                _remove(path)

    async def version(self) -> str | None:
        """vLLM's version; None for a server that does not tell."""
        try:
            url = self.endpoint.url.removesuffix("/v1") + "/version"
            async with self._session.get(url, timeout=ASIDE) as response:
                told = (await response.json())["version"] if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError):
            return None
        return told if isinstance(told, str) else None

    async def alive(self) -> bool | None:
        """As `Server.alive`; False also when vLLM tells that its engine is dead, which it does before it ends."""
        if (answers := await super().alive()) is not True:
            return answers
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        try:
            async with self._session.get(self.endpoint.url.removesuffix("/v1") + "/health", timeout=timeout) as page:
                return page.status != DEAD_ENGINE
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def settle(self) -> None:
        """Waits a moment for what the server still writes for nobody, so that `close` leaves nothing behind."""
        until = time.monotonic() + SETTLE_S
        while self._strays and time.monotonic() < until:
            await asyncio.sleep(LAST_LOOK_S)
            self._clear_strays()

    def close(self) -> None:
        """Removes what the server has written that nobody will fetch."""
        if self._flush is not None:
            self._flush.cancel()
        self._clear_strays()
        if self._unanswered:
            _sweep(self._storage, lambda process, number: f"slipstream-{process}-{number}" in self._unanswered)

    async def _prefill(self, token_ids: Sequence[int], fields: Mapping[str, object]) -> dict[str, Any]:
        body = {"model": self.endpoint.model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0, **fields}
        self._asking += 1
        try:
            async with self._slots:
                name = request_name()
                self._unanswered.add(name)
                answer = await self._post(f"{self.endpoint.url}/completions", body | {"request_id": name})
                self._unanswered.discard(name)
                return answer
        finally:
            self._asking -= 1
            self._answers += 1

    def _named(self, answer: dict[str, Any]) -> Path:
        try:
            named = answer["kv_transfer_params"]["hidden_states_path"]
        except (LookupError, TypeError):
            named = None
        if not isinstance(named, str) or not named:
            raise ServerError(
                f"{self.endpoint.url}: answered without a hidden-state file; it is not an extraction server"
            )
        path = Path(os.path.realpath(named))
        if path == self._storage or not path.is_relative_to(self._storage):
            raise ServerError(
                f"{self.endpoint.url}: named {named}, outside its storage folder {self._storage}; not read"
            )
        return path

    async def _written(self, path: Path, began: float, timeout_s: float) -> None:
        answered, answers, pause = time.monotonic(), self._answers, FIRST_LOOK_S
        next_flush = answered + FLUSH_EVERY_S
        while (lock := _Lock.of(path)).held or not path.exists():
            now = time.monotonic()
            if lock.free:  # asked for before the file was: nobody writes any more
                await self.flush()  # raises when it is the server's death that freed the lock
                if path.exists():
                    return
                raise NoFile(f"{path}: the server answered 200, but its writer ended without the file; see its log")
            if now - began > timeout_s:
                raise NoFile(f"{path}: the server answered 200 but wrote no file within {timeout_s:g} s")
            idle = self._asking == 0 and self._answers == answers and now - answered > IDLE_S
            if idle or now > next_flush:
                next_flush = now + FLUSH_EVERY_S
                await self.flush()
            await asyncio.sleep(pause)
            pause = min(LAST_LOOK_S, pause * 1.5)

    async def flush(self) -> None:
        """One token through the engine, so that it writes what it still holds; many who ask at once share one."""
        if self._flush is None or self._flush.done():
            self._flush = asyncio.ensure_future(self._step())
            self._flush.add_done_callback(lambda step: step.cancelled() or step.exception())  # nobody may wait for it
        await asyncio.shield(self._flush)

    async def _step(self) -> None:
        self._clear_strays()
        try:
            self._strays.add(self._named(await self._prefill([1], {})))
        except Unreachable:
            raise
        except SlipstreamError as error:
            raise Unreachable(f"{self.endpoint.url}: {error} (asked for one token while waiting for a file)") from error

    def _clear_strays(self) -> None:
        for path in list(self._strays):
            if (lock := _Lock.of(path)).free or (path.exists() and not lock.held):
                _remove(path)
                self._strays.discard(path)


class _Lock:
    """The state of the lock beside a file at one moment."""

    def __init__(self, held: bool, free: bool) -> None:
        self.held, self.free = held, free

    @classmethod
    def of(cls, path: Path) -> _Lock:
        """Whether the writer holds it, or has let go of it; neither when there is none."""
        try:
            fd = os.open(path.with_name(path.name + ".lock"), os.O_RDONLY)
        except FileNotFoundError:
            return cls(held=False, free=False)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return cls(held=False, free=True)
        except BlockingIOError:
            return cls(held=True, free=False)
        finally:
            os.close(fd)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_name(path.name + ".lock").unlink(missing_ok=True)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())


def process_name() -> str:
    """This process among all that may use a storage folder: host and process id."""
    return f"{_host()}-{os.getpid()}"


def process_is_gone(name: str) -> bool:
    """Whether the process of a `process_name` ran on this host and does so no more."""
    host, _, pid = name.rpartition("-")
    return host == _host() and pid.isdigit() and not Path("/proc", pid).exists()


def request_name() -> str:
    """A request's name, `slipstream-<host>-<pid>-<number>`."""
    return f"slipstream-{process_name()}-{next(_numbers)}"


OURS = re.compile(r"^(?:chat)?cmpl-slipstream-(?P<process>.+?-\d+)-(?P<number>\d+)[-.]")


def sweep(storage: Path) -> int:
    """Removes the files that servers wrote for clients of this host that are dead; returns how many files."""
    return _sweep(storage, lambda process, number: process_is_gone(process))


def _sweep(storage: Path, unwanted: Callable[[str, str], bool]) -> int:
    removed = 0
    with suppress(FileNotFoundError):
        for entry in list(os.scandir(storage)):
            found = OURS.match(entry.name)
            if found and unwanted(found["process"], found["number"]):
                Path(entry.path).unlink(missing_ok=True)
                removed += 1
    return removed
