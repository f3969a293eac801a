"""Prompts between reading and splitting, on the disk: ten million take no more memory than ten.

A temporary SQLite database without journal and fsync.  Nobody reads it after the process that wrote it, and a
leftover is swept like any temporary file.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import Source
from slipstream.errors import InputError, StageFailed
from slipstream.traces import sources
from slipstream.traces.prompts import Prompt
from slipstream.traces.sources import Reject
from slipstream.traces.splits import position

CACHE_KIB = 4096
TABLES = """
    CREATE TABLE prompts (
        held_out INTEGER, content TEXT, key TEXT, kind TEXT, source INTEGER, position REAL, line TEXT,
        PRIMARY KEY (held_out, content)
    );
    CREATE INDEX in_key_order ON prompts (held_out, key, source, position);
    CREATE TABLE ids (
        held_out INTEGER, id TEXT, content TEXT, file TEXT, row INTEGER, PRIMARY KEY (held_out, id)
    ) WITHOUT ROWID;
"""


@dataclass
class Tally:
    """Rows of one source: `new` prompts, those that only repeat one that was read before, rejected ones."""

    new: int = 0
    repeated: int = 0
    rejected: int = 0

    @property
    def rows(self) -> int:
        """All that were read."""
        return self.new + self.repeated + self.rejected


@dataclass(frozen=True)
class Place:
    """Where a gathered prompt stands: by key, in its domain, in [0, 1), in its list of sources, in the database."""

    key: str
    kind: str
    position: float
    held_out: bool
    source: int
    number: int


class Gathered:
    """Distinct prompts, those of `sources` and those of `held_out_sources` apart.

    Of several rows with one content the smallest key stays; the prompt belongs to the first source that has it.
    """

    def __init__(self, db: sqlite3.Connection, seed: int) -> None:
        self._db, self._seed = db, seed

    def read(
        self, given: Sequence[Source], held_out: bool, on_reject: Callable[[Reject], object], keep: bool = True
    ) -> list[Tally]:
        """Reads sources, one tally for each; with `keep` off the prompts are only counted, their text is not stored.

        Raises InputError for a source that cannot be read and for two different prompts under one id.
        """
        tallies = [Tally() for _ in given]
        for index, (source, tally) in enumerate(zip(given, tallies, strict=True)):
            for found in sources.read(source):
                if isinstance(found, Reject):
                    on_reject(found)
                    tally.rejected += 1
                elif self._add(found, index, held_out, json.dumps(found.to_json()) if keep else ""):
                    tally.new += 1
                else:
                    tally.repeated += 1
        return tallies

    def _add(self, prompt: Prompt, source: int, held_out: bool, line: str) -> bool:
        if prompt.id is not None:
            self._claim_id(prompt, held_out)
        content = prompt.content_key
        row = (held_out, content, prompt.key, prompt.kind, source, position(prompt, self._seed), line)
        if self._db.execute("INSERT OR IGNORE INTO prompts VALUES (?, ?, ?, ?, ?, ?, ?)", row).rowcount:
            return True
        smaller = "UPDATE prompts SET key = ?, kind = ?, line = ? WHERE held_out = ? AND content = ? AND key > ?"
        self._db.execute(smaller, (prompt.key, prompt.kind, line, held_out, content, prompt.key))
        return False

    def _claim_id(self, prompt: Prompt, held_out: bool) -> None:
        row = (held_out, prompt.id, prompt.content_key, prompt.file, prompt.row)
        if self._db.execute("INSERT OR IGNORE INTO ids VALUES (?, ?, ?, ?, ?)", row).rowcount:
            return
        known = "SELECT content, file, row FROM ids WHERE held_out = ? AND id = ?"
        content, file, number = self._db.execute(known, (held_out, prompt.id)).fetchone()
        if content != prompt.content_key:
            raise InputError(
                f"{prompt.file}: row {prompt.row} has id {prompt.id} like {file} row {number}, but asks something else"
            )

    def set_apart(self) -> None:
        """Drops from `sources` what `held_out_sources` ask as well."""
        self._db.execute(
            "DELETE FROM prompts WHERE held_out = 0 AND content IN (SELECT content FROM prompts WHERE held_out = 1)"
        )

    def usable(self, source: int) -> int:
        """Prompts that belong to one of `sources`."""
        count = "SELECT count(*) FROM prompts WHERE held_out = 0 AND source = ?"
        return int(self._db.execute(count, (source,)).fetchone()[0])

    def apart(self) -> int:
        """Prompts of `held_out_sources`."""
        return int(self._db.execute("SELECT count(*) FROM prompts WHERE held_out = 1").fetchone()[0])

    def first(self, shares: Sequence[int]) -> Iterator[Place]:
        """The first prompts of `sources` in key order: so many of each source, or of all when one share is given."""
        left = list(shares)
        for place in self._in_key_order(held_out=False):
            pool = place.source if len(left) > 1 else 0
            if left[pool]:
                left[pool] -= 1
                yield place

    def held_out(self) -> Iterator[Place]:
        """The prompts of `held_out_sources` in key order."""
        return self._in_key_order(held_out=True)

    def _in_key_order(self, held_out: bool) -> Iterator[Place]:
        ordered = "SELECT key, kind, position, held_out, source, rowid FROM prompts WHERE held_out = ? ORDER BY key"
        return (Place(*row) for row in self._db.execute(ordered, (held_out,)))

    def line(self, place: Place) -> str:
        """The prompt as the artifact stores it, one line of JSON."""
        return str(self._db.execute("SELECT line FROM prompts WHERE rowid = ?", (place.number,)).fetchone()[0])


@contextmanager
def gathering(path: Path | None, seed: int) -> Iterator[Gathered]:
    """An empty database at `path`, removed in the end; without a path in SQLite's own temporary file.

    Raises StageFailed when the disk is full.
    """
    db = sqlite3.connect(path or "", isolation_level=None)
    try:
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE"):
            db.execute(f"PRAGMA {pragma}")
        db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        db.executescript(TABLES)
        db.execute("BEGIN")
        yield Gathered(db, seed)
    except sqlite3.OperationalError as error:
        raise StageFailed(f"{path or 'prompts'}: cannot sort the prompts ({error}); make room and run again") from error
    finally:
        db.close()
        if path is not None:
            path.unlink(missing_ok=True)
