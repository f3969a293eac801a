"""Whether a finished store still has all its files and its rows, and what to do when it has not."""

from __future__ import annotations

from pathlib import Path

from slipstream import artifact
from slipstream.artifact import Damage
from slipstream.errors import Damaged

NAMED_FILES = 8


def repair(store: Path) -> str:
    """What to do about a damaged store."""
    return f"run `slipstream verify --deep {store}` and then the same run again: it makes anew what is damaged, alone"


def require_complete(store: Path) -> None:
    """Raises Damaged, naming the files, unless every one of the store's is there in its full size, the rows unchanged.

    Nobody compares the rows' loss mask later: their files (24 bytes a token) are read here, the states when they are
    used.
    """
    if damage := artifact.verify(store) or _changed_rows(store):
        named = ", ".join(f"{item.path} ({item.reason})" for item in damage[:NAMED_FILES])
        more = f" and {len(damage) - NAMED_FILES} more" if len(damage) > NAMED_FILES else ""
        raise Damaged(
            f"{store}: {len(damage)} of its files are not as its manifest says: {named}{more}; {repair(store)}"
        )


def _changed_rows(store: Path) -> list[Damage]:
    records = {name: record for name, record in artifact.read_manifest(store).files.items() if name.endswith(".arrow")}
    changed = [name for name, record in records.items() if artifact.checksum(store / name) != record.checksum]
    return [Damage(path=name, reason="checksum differs") for name in changed]
