"""The traces' row pool and ledger: what it has is never asked for again.

`<workdir>/pool/traces/<recipe>/rows.sqlite3`, keyed by prompt.  SQLite in WAL mode: a row is committed as
soon as its answer arrives, a kill -9 leaves the last commit, a torn record cannot be.  The recipe names
verifier, type and sampling; policies (what to keep) apply later, so changing one asks for nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.artifact import locked
from slipstream.traces.trace import Trace

BATCH = 500  # keys a query; SQLite takes at most 32,766 variables


class TracePool:
    """Traces by prompt key; open one with `open_pool`."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, timeout=60)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("CREATE TABLE IF NOT EXISTS traces (key TEXT PRIMARY KEY, row TEXT NOT NULL) WITHOUT ROWID")

    def close(self) -> None:
        """Ends the connection."""
        self._db.close()

    def add(self, trace: Trace) -> None:
        """Records an answer; the first one for a key stays."""
        self._db.execute("INSERT OR IGNORE INTO traces VALUES (?, ?)", (trace.key, trace.to_json()))

    def get(self, keys: Iterable[str]) -> Iterator[Trace]:
        """The traces that are there, in the order of `keys`."""
        for batch in _batches(keys):
            marks = ",".join("?" * len(batch))
            found = dict(self._db.execute(f"SELECT key, row FROM traces WHERE key IN ({marks})", batch))
            yield from (Trace.from_json(found[key]) for key in batch if key in found)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The keys that have no trace yet, in their order."""
        lacking: list[str] = []
        for batch in _batches(keys):
            marks = ",".join("?" * len(batch))
            found = {key for (key,) in self._db.execute(f"SELECT key FROM traces WHERE key IN ({marks})", batch)}
            lacking += [key for key in batch if key not in found]
        return lacking


def _batches(keys: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for key in keys:
        batch.append(key)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


@contextmanager
def open_pool(workdir: Path, recipe: str) -> Iterator[TracePool]:
    """The pool of one recipe, held exclusively: two runs never ask for the same row at once."""
    folder = workdir / "pool" / "traces" / recipe
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        pool = TracePool(folder / "rows.sqlite3")
        try:
            yield pool
        finally:
            pool.close()
