"""Room on the disks that a capture fills: it waits while there is too little, and no sample is lost to a full disk.

Before a request is sent, its sample and all samples in flight must fit above the reserve.  A disk that others fill,
or a quota that no free space shows, is met all the same (ENOSPC, EDQUOT, SQLite's SQLITE_FULL): then nothing new is
sent for a while and the sample is asked for again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from slipstream.errors import SlipstreamError, TransientError

LOOK_EVERY_S = 0.5
REST_S = 2.0  # after a write met a full disk
GIB = 1 << 30


class DiskFull(SlipstreamError):
    """A write met a full disk, here or at the server."""


class NoRoom(TransientError):
    """There was no room for longer than the patience; nothing that was captured is lost."""


def is_full(error: BaseException) -> bool:
    """Whether this error is a full disk or quota."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """Free space under the folders that a capture fills.

    `waiting` says what it waits for (empty while it does not), `paused_s` how long nothing could be sent because of it.
    """

    def __init__(self, folder: Path, reserve_gib: float, patience_s: float) -> None:
        self._folders = {folder.stat().st_dev: folder}
        self._reserve_gib, self._patience_s = reserve_gib, patience_s
        self._in_flight = 0  # bytes
        self._waiters = 0
        self._paused_at = 0.0
        self._full_since: float | None = None  # when a write met a full disk, until one succeeds
        self._rests_until = 0.0
        self.waiting = ""
        self.paused_s = 0.0

    def watch(self, folder: Path) -> None:
        """Looks at the file system of this folder as well."""
        self._folders.setdefault(folder.stat().st_dev, folder)

    def shortage(self, size: int = 0) -> str | None:
        """Where so many bytes beyond those in flight have no room above the reserve; None when they have."""
        needed = self._reserve_gib + (self._in_flight + size) / GIB
        for folder in self._folders.values():
            free = os.statvfs(folder)
            gib = free.f_bavail * free.f_frsize / GIB
            if gib < needed:
                return f"{folder}: {gib:.3g} GiB free, {needed:.3g} needed"
        if time.monotonic() < self._rests_until:
            return f"{next(iter(self._folders.values()))}: the disk or its quota is full"
        return None

    @asynccontextmanager
    async def room(self, size: int) -> AsyncIterator[None]:
        """Room for a sample of `size` bytes, kept until the block ends; waits for it.

        Raises NoRoom when there is none for longer than the patience.
        """
        await self.wait(size)
        self._in_flight += size
        try:
            yield
        finally:
            self._in_flight -= size

    async def wait(self, size: int = 0) -> None:
        """Returns when `size` more bytes have room; raises NoRoom when that takes too long."""
        if self.shortage(size) is None:
            return
        since = None
        if not self._waiters:
            self._paused_at = time.monotonic()
        self._waiters += 1
        try:
            while (shortage := self.shortage(size)) is not None:
                now = time.monotonic()
                if self._in_flight:
                    since = None  # what is in flight ends, and then takes less than was kept for it
                elif since is None:
                    since = now
                began = min(moment for moment in (since, self._full_since, now) if moment is not None)
                if now - began > self._patience_s:
                    raise NoRoom(self._sentence(shortage))
                self.waiting = shortage
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._waiters -= 1
            if not self._waiters:
                self.waiting = ""
                self.paused_s += time.monotonic() - self._paused_at

    def met_full(self) -> None:
        """Notes that a write met a full disk: nothing new is sent for a moment."""
        now = time.monotonic()
        self._full_since = self._full_since or now
        self._rests_until = now + REST_S

    def wrote(self) -> None:
        """Notes that a write succeeded."""
        self._full_since = None

    def _sentence(self, shortage: str) -> str:
        return (
            f"{shortage} (features.disk_reserve_gib {self._reserve_gib:g} and the samples in flight) for "
            f"{self._patience_s:g} s: free some space there or lower the reserve, then run again; what was captured "
            "is kept"
        )


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """A full disk inside the block becomes a TransientError that says so."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if not is_full(error):
            raise
        raise TransientError(
            f"{folder}: the disk is full ({error}); free some space there and run again; what was captured is kept"
        ) from error
