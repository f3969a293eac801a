"""The hidden states' row pool: one file a token sequence, never captured twice.

`<workdir>/pool/features/<recipe>/<ab>/<key>.safetensors`, key = digest of the token ids, recipe = verifier,
layer ids and their meaning, type.  `index.sqlite3` beside them keeps each file's size, checksum and range.
A file under its final name is complete (written elsewhere, synced, renamed); one that a kill left without
an index entry is checked and adopted instead of captured again.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import xxhash

from slipstream import atomic
from slipstream.artifact import FileRecord
from slipstream.digest import digest_tokens
from slipstream.features.sample import BadSample, SampleInfo, check

COLUMNS = "key TEXT PRIMARY KEY, size INTEGER, checksum TEXT, tokens INTEGER, minimum REAL, maximum REAL"


class FeaturePool:
    """Hidden states by token sequence for one recipe.  Safe to use from several threads and processes."""

    def __init__(self, workdir: Path, recipe: str, layers: int, hidden: int, dtype: str) -> None:
        self.folder = workdir / "pool" / "features" / recipe
        self.folder.mkdir(parents=True, exist_ok=True)
        self.layers, self.hidden, self.dtype = layers, hidden, dtype
        self._lock = threading.Lock()
        self._db = sqlite3.connect(
            self.folder / "index.sqlite3", isolation_level=None, timeout=60, check_same_thread=False
        )
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(f"CREATE TABLE IF NOT EXISTS samples ({COLUMNS}) WITHOUT ROWID")

    def close(self) -> None:
        """Ends the connection to the index."""
        self._db.close()

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
            row = self._db.execute("SELECT * FROM samples WHERE key = ?", (key,)).fetchone()
        if row is not None and row[1] == size:
            return SampleInfo(FileRecord(size=row[1], checksum=row[2]), row[3], row[4], row[5])
        if row is not None:
            return None  # another size than recorded: damaged, to be captured again
        try:
            data = path.read_bytes()
            return self._record(key, token_ids, data, check(data, token_ids, self.layers, self.hidden, self.dtype))
        except BadSample:
            return None

    def add(self, token_ids: Sequence[int], captured: Path) -> SampleInfo:
        """Checks the file a server wrote and moves it in; raises BadSample and leaves the file alone."""
        data = captured.read_bytes()
        key = digest_tokens(token_ids)
        span = check(data, token_ids, self.layers, self.hidden, self.dtype)
        path = self.path(key)
        path.parent.mkdir(exist_ok=True)
        try:
            atomic.fsync_file(captured)
            os.replace(captured, path)
            atomic.fsync_folder(path.parent)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            atomic.write_bytes(path, data)  # the server writes on another file system
            captured.unlink()
        return self._record(key, token_ids, data, span)

    def _record(self, key: str, token_ids: Sequence[int], data: bytes, span: tuple[float, float]) -> SampleInfo:
        file = FileRecord(size=len(data), checksum=str(xxhash.xxh3_128(data).hexdigest()))
        info = SampleInfo(file, len(token_ids), *span)
        row = (key, file.size, file.checksum, info.tokens, *span)
        with self._lock:
            self._db.execute("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?)", row)
        return info
