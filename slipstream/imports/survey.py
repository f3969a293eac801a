"""The first pass over a store: every sample's tokens, mask and form, without its states.

What is wrong with the store as a whole (another hidden size, another type, tokens beyond the vocabulary, no
supervision) is known, and refused, before a byte of states is read or a server starts.  The rows wait in a temporary
SQLite database on the disk, so that memory does not grow with their number; nobody reads it after this process.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import atomic
from slipstream.artifact import LOCK, locked
from slipstream.digest import digest_tokens
from slipstream.imports.found import Bad, Sample, Store
from slipstream.traces.splits import position_of

TABLE = """
    CREATE TABLE samples (
        name TEXT PRIMARY KEY, number INTEGER, key TEXT, place REAL, tokens BLOB, mask BLOB,
        top INTEGER, layers INTEGER, hidden INTEGER, dtype TEXT, reason TEXT
    );
    CREATE INDEX by_key ON samples (key);
"""
REPEATED, UNSUPERVISED = "repeats an earlier sample", "no supervised token"
HARMLESS = frozenset({REPEATED, UNSUPERVISED})  # nothing is lost with them
COLUMNS = "name, number, tokens, mask, layers, hidden, dtype"


@dataclass(frozen=True)
class Row:
    """A usable sample with its key (digest of the tokens) and its place in [0, 1), which decides its split."""

    key: str
    place: float
    sample: Sample


class Survey:
    """The samples of one store; made by `surveying`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def add(self, found: Sample | Bad, seed: int) -> None:
        """Records a sample, or a file that is none."""
        if isinstance(found, Bad):
            row: tuple[object, ...] = (found.name, found.number, *[None] * 8, found.reason)
        else:
            key = digest_tokens(found.token_ids)
            place = position_of(_content(found), seed)
            tokens, mask = found.token_ids.astype("<i8").tobytes(), found.loss_mask.tobytes()
            form = (found.layers, found.hidden, found.dtype)
            row = (found.name, found.number, key, place, tokens, mask, int(found.token_ids.max()), *form, None)
        self._db.execute("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def reject(self, name: str, reason: str) -> None:
        """Sets a sample aside."""
        self._db.execute("UPDATE samples SET reason = ? WHERE name = ?", (reason, name))

    def highest_token(self) -> tuple[str, int]:
        """The largest token id of the store and the file that holds it."""
        name, top = self._db.execute("SELECT name, max(top) FROM samples WHERE top IS NOT NULL").fetchone()
        return str(name), int(top or 0)

    def values(self, column: str) -> list[tuple[Any, int, str]]:
        """The values of `layers`, `hidden` or `dtype`, most frequent first: value, samples, the first one's name."""
        found = f"SELECT {column}, count(*), name, min(number) FROM samples WHERE reason IS NULL GROUP BY 1"
        return [(value, count, name) for value, count, name, _ in self._db.execute(f"{found} ORDER BY 2 DESC, 4")]

    def reject_others(self, column: str, value: Any) -> None:
        """Sets the samples aside whose `column` is not `value`."""
        reason = f"{column} '||{column}||' instead of {value}"
        self._db.execute(f"UPDATE samples SET reason = '{reason}' WHERE reason IS NULL AND {column} IS NOT ?", (value,))

    def reject_repeated(self) -> int:
        """Sets aside what only repeats an earlier sample, tokens and mask; returns how many."""
        first = "SELECT min(number) FROM samples WHERE reason IS NULL GROUP BY key, mask"
        update = f"UPDATE samples SET reason = ? WHERE reason IS NULL AND number NOT IN ({first})"
        return self._db.execute(update, (REPEATED,)).rowcount

    def reject_unsupervised(self) -> int:
        """Sets aside what has no token under its mask; returns how many."""
        update = "UPDATE samples SET reason = ? WHERE reason IS NULL AND instr(mask, x'01') = 0"
        return self._db.execute(update, (UNSUPERVISED,)).rowcount

    def usable(self, order: str = "number") -> Iterator[Row]:
        """The samples that are not set aside, by number in the store, or in order of `key`."""
        wanted = "key, number" if order == "key" else "number"
        found = self._db.execute(
            f"SELECT key, place, {COLUMNS} FROM samples WHERE reason IS NULL ORDER BY {wanted}"  # fixed texts only
        )
        for key, place, *rest in found:
            yield Row(key, place, _sample(*rest))

    def rejects(self) -> list[tuple[str, str]]:
        """Name and reason of what was set aside, in the order of the store."""
        rows = self._db.execute("SELECT name, reason FROM samples WHERE reason IS NOT NULL ORDER BY number")
        return [(str(name), str(reason)) for name, reason in rows]

    def count(self) -> int:
        """Samples that are not set aside."""
        return int(self._db.execute("SELECT count(*) FROM samples WHERE reason IS NULL").fetchone()[0])

    def places(self) -> Iterator[float]:
        """The places of what is usable."""
        return (row[0] for row in self._db.execute("SELECT place FROM samples WHERE reason IS NULL"))


def _content(sample: Sample) -> str:
    """What decides a row's split: its tokens before the first supervised one, so that two answers to a prompt agree.

    A row that is supervised from the start has only itself.
    """
    supervised = np.flatnonzero(sample.loss_mask)
    prompt = sample.token_ids[: supervised[0]] if len(supervised) else sample.token_ids
    return digest_tokens(prompt if len(prompt) else sample.token_ids)


def _sample(name: str, number: int, tokens: bytes, mask: bytes, layers: int, hidden: int, dtype: str) -> Sample:
    ids, supervised = np.frombuffer(tokens, dtype="<i8"), np.frombuffer(mask, dtype=np.int8)
    return Sample(name, number, ids, supervised, layers, hidden, dtype)


@contextmanager
def surveying(workdir: Path, store: Store, seed: int, on_sample: Callable[[int, int], None]) -> Iterator[Survey]:
    """The survey of `store`, on the disk of the work directory while the block lasts; one import at a time."""
    folder = workdir / "pool" / "imports"
    with locked(folder / LOCK):
        atomic.sweep(folder)
        path = folder / f".survey.{os.getpid()}{atomic.SUFFIX}"
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("journal_mode = OFF", "synchronous = OFF"):
                db.execute(f"PRAGMA {pragma}")
            db.executescript(TABLE)
            survey = Survey(db)
            db.execute("BEGIN")
            for done, found in enumerate(store.survey(), 1):
                survey.add(found, seed)
                on_sample(done, store.count)
            db.execute("COMMIT")
            yield survey
        finally:
            db.close()
            path.unlink(missing_ok=True)
