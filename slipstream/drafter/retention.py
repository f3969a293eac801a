"""What stays of finished epochs: every export, and the checkpoints that somebody still needs.

A checkpoint of Kimi-K2.5's width is 20 GB.  Once an epoch is exported, its checkpoint is needed only to continue from
(the last one) or to go on with the best drafter (`drafter.keep_checkpoints` best_and_last).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slipstream.drafter import checkpoints, selection


class Retention:
    """Exports epochs as they become complete and drops checkpoints; may be asked at any time, also during training."""

    def __init__(self, store: Path, keep_all: bool, export: Callable[[str], object]) -> None:
        self._store, self._keep_all, self._export = store, keep_all, export
        self._seen: list[int] = []

    def poll(self) -> None:
        """Exports what is new; whatever `export` raises is raised."""
        epochs = checkpoints.finished_epochs(self._store)
        if epochs == self._seen:
            return
        for epoch in epochs:
            if epoch not in self._seen:
                self._export(str(epoch))
        self._seen = epochs
        if self._keep_all:
            return
        best = selection.best(selection.lengths(self._store))
        for epoch in epochs[:-1]:
            if epoch != best:
                checkpoints.prune(self._store, epoch)
