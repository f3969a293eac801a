"""Which samples of a row pool a probe has vouched for: `probed.sqlite3` in the pool's folder.

Samples that were in a shard whose probe failed are doubted until a probe passes them or they are captured again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

FILE = "probed.sqlite3"


def unprobed(pool: Path, keys: Iterable[str]) -> set[str]:
    """Those of `keys` that no probe has vouched for since they were captured."""
    with _open(pool) as database:
        found = database.execute("SELECT key FROM probed")
        return set(keys) - {key for (key,) in found}


def doubted(pool: Path, keys: Iterable[str]) -> set[str]:
    """Those of `keys` that a failed probe left."""
    with _open(pool) as database:
        found = database.execute("SELECT key FROM doubted")
        return set(keys) & {key for (key,) in found}


def vouch(pool: Path, keys: Iterable[str]) -> None:
    """Remembers that a probe passed which these samples were part of."""
    rows = [(key,) for key in keys]
    with _open(pool) as database:
        database.executemany("INSERT OR IGNORE INTO probed VALUES (?)", rows)
        database.executemany("DELETE FROM doubted WHERE key = ?", rows)


def doubt(pool: Path, keys: Iterable[str]) -> None:
    """Remembers that a probe failed which these samples were part of: the next one looks at them first."""
    with _open(pool) as database:
        database.executemany("INSERT OR IGNORE INTO doubted VALUES (?)", [(key,) for key in keys])


def forget(pool: Path, keys: Iterable[str]) -> None:
    """To be called before samples are captured again: a probe has vouched for other files."""
    rows = [(key,) for key in keys]
    with _open(pool) as database:
        database.executemany("DELETE FROM probed WHERE key = ?", rows)
        database.executemany("DELETE FROM doubted WHERE key = ?", rows)


@contextmanager
def _open(pool: Path) -> Iterator[sqlite3.Connection]:
    """One transaction; shards of several processes take turns."""
    with closing(sqlite3.connect(pool / FILE, timeout=60)) as database, database:
        for table in ("probed", "doubted"):
            database.execute(f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY) WITHOUT ROWID")
        yield database
