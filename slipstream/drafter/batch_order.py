"""The batches of an epoch from a given one on: a training that continues reads nothing of what it has trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler


class BatchOrder(Sampler[list[int]]):
    """speculators' packed batches in its order; `start` leaves out the first ones of an epoch.

    `len` is of the whole epoch, whatever is left out.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler, self._skipped = sampler, 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next passes, all batches of it."""
        self.start(epoch, 0)

    def start(self, epoch: int, skipped: int) -> None:
        """Chooses the order of the next passes, without its first `skipped` batches."""
        self._sampler.set_epoch(epoch)
        self._skipped = skipped

    def steps(self, epochs: int) -> list[int]:
        """How many batches each of the first epochs has: packing follows the order, so they may differ."""
        return [len(self._sampler._generate_batches(epoch)) for epoch in range(epochs)]

    def batch(self, epoch: int, step: int) -> list[int]:
        """The indices of one batch, counted from the epoch's first."""
        return [int(index) for index in self._sampler._generate_batches(epoch)[step]]

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        yield from list(self._sampler)[self._skipped :]
