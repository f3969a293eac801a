"""The hidden states' row pool: one file a token sequence, never captured twice.

`<workdir>/pool/features/<recipe>/<ab>/<key>.safetensors`, key = digest of the token ids, recipe = verifier,
layer ids and their meaning, type.  `index.sqlite3` beside them keeps each file's size, checksum and range.

* A file under its final name is complete: written under another name, renamed.  One that a kill left without an
  index entry is checked and adopted instead of captured again.
* Checks and checksum are computed from the file's pages while they are in the page cache, in one visit.
* Bytes are forced to the disk by `sync`, before a manifest vouches for them, and not file by file while servers
  write.  An entry that was never synced and is older than the machine's last start is read and compared once.
"""

from __future__ import annotations

import errno
import mmap
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from slipstream import atomic
from slipstream.artifact import FileRecord
from slipstream.digest import digest_tokens
from slipstream.features.extraction import process_name
from slipstream.features.sample import BadSample, Form, SampleInfo, examine

TABLE = "files"
COLUMNS = (
    "key TEXT PRIMARY KEY, size INTEGER, checksum TEXT, tokens INTEGER, minimum REAL, maximum REAL, "
    "boot TEXT"  # NULL once synced, else the machine's start during which it was written
)


def _boot() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else "unknown"


@contextmanager
def mapped(path: Path) -> Iterator[Any]:
    """The bytes of a file, mapped; raises BadSample for an empty one."""
    with path.open("rb") as file:
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            data = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        except ValueError:
            raise BadSample("an empty file") from None
    try:
        yield data
    finally:
        with suppress(BufferError):  # an error's traceback still holds a view; the mapping goes with it
            data.close()


def folder_of(workdir: Path, recipe: str) -> Path:
    """The folder of a recipe's pool."""
    return workdir / "pool" / "features" / recipe


class FeaturePool:
    """Hidden states by token sequence for one recipe.  Safe to use from several threads and processes.

    With `several_hosts` the index has no write-ahead log: SQLite shares one through memory, which only processes of
    one host have.  Its locks then are the network file system's.
    """

    def __init__(self, workdir: Path, recipe: str, form: Form, several_hosts: bool = False) -> None:
        self.folder = folder_of(workdir, recipe)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.form = form
        self._copies = self.folder.parent / "incoming" / f"{process_name()}-copies"
        self._boot = _boot()
        self._lock = threading.Lock()
        self._db = sqlite3.connect(
            self.folder / "index.sqlite3", isolation_level=None, timeout=60, check_same_thread=False
        )
        self._db.execute(f"PRAGMA journal_mode={'DELETE' if several_hosts else 'WAL'}")
        self._db.execute(f"PRAGMA synchronous={'FULL' if several_hosts else 'NORMAL'}")
        self._db.execute(f"CREATE TABLE IF NOT EXISTS {TABLE} ({COLUMNS}) WITHOUT ROWID")

    def close(self) -> None:
        """Ends the connection to the index."""
        self._db.close()
        with suppress(OSError):  # not there, or another pool of this process has a copy in it
            self._copies.rmdir()

    def path(self, key: str) -> Path:
        """Where the sample of this key lies or will lie."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def find(self, token_ids: Sequence[int]) -> SampleInfo | None:
        """The sample of this token sequence when its file is there in full, else None."""
        key = digest_tokens(token_ids)
        path = self.path(key)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return None
        with self._lock:
            row = self._db.execute(f"SELECT * FROM {TABLE} WHERE key = ?", (key,)).fetchone()
        if row is None:
            return self._adopt(key, token_ids)
        info = SampleInfo(FileRecord(size=row[1], checksum=row[2]), row[3], row[4], row[5])
        if info.file.size != size:
            return None  # another size than recorded: damaged, to be captured again
        if row[6] not in (None, self._boot):
            return self._survived(key, info)
        return info

    def add(self, token_ids: Sequence[int], captured: Path) -> SampleInfo:
        """Checks the file a server wrote and moves it in; raises BadSample and leaves the file alone."""
        key = digest_tokens(token_ids)
        path = self.path(key)
        with mapped(captured) as data:
            info = examine(data, token_ids, self.form)
            path.parent.mkdir(exist_ok=True)
            self._forget(key)  # else a kill after the rename leaves the new file with the damaged one's checksum
            try:
                os.replace(captured, path)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                self._copy(data, path)  # the server writes on another file system
                captured.unlink()
        return self._record(key, info)

    def _copy(self, data: Any, path: Path) -> None:
        """Writes `data` to `path` through a folder of this process, which `servers.sweep` clears after a kill."""
        copy = self._copies / f"{threading.get_ident()}-{path.name}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            copy.write_bytes(data)
            os.replace(copy, path)
        except BaseException:
            copy.unlink(missing_ok=True)
            raise

    def sync(self, keys: Sequence[str]) -> int:
        """Forces these samples' bytes and names to the disk, as far as that was not done; returns how many."""
        with self._lock:
            unsynced = [key for key in keys if self._unsynced(key)]
        with ThreadPoolExecutor(max_workers=8) as threads:
            list(threads.map(lambda key: atomic.fsync_file(self.path(key)), unsynced))
            list(threads.map(atomic.fsync_folder, {self.path(key).parent for key in unsynced}))
        with self._lock:
            self._db.execute("BEGIN")
            self._db.executemany(f"UPDATE {TABLE} SET boot = NULL WHERE key = ?", [(key,) for key in unsynced])
            self._db.execute("COMMIT")
        return len(unsynced)

    def _unsynced(self, key: str) -> bool:
        row = self._db.execute(f"SELECT boot FROM {TABLE} WHERE key = ?", (key,)).fetchone()
        return row is not None and row[0] is not None

    def _adopt(self, key: str, token_ids: Sequence[int]) -> SampleInfo | None:
        try:
            with mapped(self.path(key)) as data:
                info = examine(data, token_ids, self.form)
        except BadSample:
            return None
        return self._record(key, info)

    def _survived(self, key: str, info: SampleInfo) -> SampleInfo | None:
        """The entry of an earlier start of the machine, if the disk holds what the index says."""
        with mapped(self.path(key)) as data:
            if xxhash.xxh3_128(data).hexdigest() != info.file.checksum:
                return None
        return self._record(key, info)

    def _forget(self, key: str) -> None:
        with self._lock:
            if self._db.execute(f"SELECT 1 FROM {TABLE} WHERE key = ?", (key,)).fetchone():
                self._db.execute(f"DELETE FROM {TABLE} WHERE key = ?", (key,))

    def _record(self, key: str, info: SampleInfo) -> SampleInfo:
        row = (key, info.file.size, info.file.checksum, info.tokens, info.minimum, info.maximum, self._boot)
        with self._lock:
            self._db.execute(f"INSERT OR REPLACE INTO {TABLE} VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return info
