"""The traces' row pool and ledger: what it has is never asked for again.

`<workdir>/pool/traces/<recipe>/rows.sqlite3`.  The recipe names the verifier, its type and parsers; a row's key
names the prompt and how it was asked, and the turn counts the verifier's turns in it.  Policies (what to keep) apply
later, so changing one asks for nothing.

SQLite in WAL mode: a row is committed as its answer arrives (many within a moment share a commit), a kill -9 leaves
the last commit, and a torn record at the end of the log is dropped when it is opened.  A conversation is complete
when its last turn is marked final; until then a later run continues it where it stands.  What failed is in `errors`
until it succeeds.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from slipstream.artifact import locked
from slipstream.errors import Damaged, SlipstreamError, StageFailed
from slipstream.traces.trace import Trace

T = TypeVar("T")
BATCH = 64  # prompts a query: at 7,000 tokens a trace their token ids are 16 MB of Python integers
RECORD = "prompt_ids, output_ids, rest"
SCHEMA = (
    """CREATE TABLE IF NOT EXISTS rows (
        key TEXT NOT NULL, turn INTEGER NOT NULL, final INTEGER NOT NULL, at REAL NOT NULL,
        prompt_ids BLOB NOT NULL, output_ids BLOB NOT NULL, rest TEXT NOT NULL,
        UNIQUE (key, turn)
    )""",
    "CREATE TABLE IF NOT EXISTS errors (key TEXT PRIMARY KEY, reason TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TRIGGER IF NOT EXISTS answered AFTER INSERT ON rows BEGIN DELETE FROM errors WHERE key = new.key; END",
    "CREATE TRIGGER IF NOT EXISTS finished AFTER UPDATE ON rows BEGIN DELETE FROM errors WHERE key = new.key; END",
)


class TracePool:
    """Traces by row key; open one with `open_pool`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # one thread at a time uses it, not always the one that opened it (`run_async`)
        self._db = sqlite3.connect(path, isolation_level=None, timeout=60, check_same_thread=False)
        try:
            for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", *SCHEMA):
                self._execute(statement)
        except SlipstreamError:
            self._db.close()
            raise

    def close(self) -> None:
        """Ends the connection."""
        self._db.close()

    def add(self, key: str, trace: Trace, final: bool) -> None:
        """Records a turn; the first one for a key and turn stays.  `final` completes the conversation."""
        row = (key, trace.turn, final, time.time(), *trace.to_record())
        self._execute("INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def finish(self, key: str) -> None:
        """Completes a conversation whose next turn cannot be asked for: its turns so far are all there will be."""
        last = "SELECT max(turn) FROM rows WHERE key = ?1"
        self._execute(f"UPDATE rows SET final = 1 WHERE key = ?1 AND turn = ({last})", (key,))

    def fail(self, key: str, reason: str) -> None:
        """Records why a prompt has no (complete) answer; the next run asks for it again."""
        self._execute("INSERT OR REPLACE INTO errors VALUES (?, ?)", (key, reason.encode("utf-8", "replace").decode()))

    def begin(self) -> None:
        """Collects what follows until `commit`; without it every row is committed at once."""
        self._execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Commits what was collected, if anything."""
        if self._db.in_transaction:
            self._execute("COMMIT")

    @property
    def collecting(self) -> bool:
        """Whether rows wait for `commit`."""
        return self._db.in_transaction

    def turns(self, key: str) -> list[Trace]:
        """The recorded turns of one conversation, in order."""
        found = self._execute(f"SELECT {RECORD} FROM rows WHERE key = ? ORDER BY turn", (key,))
        return [Trace.from_record(*record) for record in found]

    def get(self, keys: Sequence[str]) -> dict[str, list[Trace]]:
        """The complete conversations among at most BATCH keys: turns in order by key."""
        marks = ",".join("?" * len(keys))
        done = f"SELECT key FROM rows WHERE final AND key IN ({marks})"
        found = self._execute(f"SELECT key, {RECORD} FROM rows WHERE key IN ({done}) ORDER BY key, turn", keys)
        made: dict[str, list[Trace]] = {}
        for key, *record in found:
            made.setdefault(key, []).append(Trace.from_record(*record))
        return made

    def missing(self, keys: Sequence[str]) -> dict[str, bool]:
        """Which of at most BATCH keys have no complete conversation, and whether one was begun."""
        marks = ",".join("?" * len(keys))
        found = self._execute(f"SELECT key, max(final) FROM rows WHERE key IN ({marks}) GROUP BY key", keys)
        complete = {key: bool(final) for key, final in found}
        return {key: key in complete for key in keys if not complete.get(key)}

    def errors(self, keys: Sequence[str]) -> dict[str, str]:
        """Why those of at most BATCH keys that failed did."""
        marks = ",".join("?" * len(keys))
        return dict(self._execute(f"SELECT key, reason FROM errors WHERE key IN ({marks})", keys))

    def _execute(self, statement: str, values: Sequence[object] = ()) -> list[Any]:
        """One statement; a transaction of its own unless rows are being collected."""
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:  # a full disk, a folder without write permission
            raise StageFailed(
                f"{self._path}: the ledger cannot be used ({error}); make room or repair access and run again, "
                "what is recorded is kept"
            ) from error
        except sqlite3.DatabaseError as error:
            raise Damaged(
                f"{self._path}: the ledger is damaged ({error}); move it away to ask for all again"
            ) from error


def batches(items: Iterable[T]) -> Iterator[list[T]]:
    """`items` in lists of BATCH."""
    batch: list[T] = []
    for item in items:
        batch.append(item)
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
