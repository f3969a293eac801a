"""The rows that an epoch's replay reads: the first validation rows, in order, packed the same way every time.

speculators' sampler packs anew for each epoch and may leave rows out so that ranks stay level; two epochs are only
comparable on the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from slipstream.drafter.job import Job


class InOrder:
    """Batches of row indices for one rank; every rank has as many (the last may be empty, FSDP waits for all)."""

    def __init__(self, lengths: Sequence[int], capacity: int, rank: int, world_size: int) -> None:
        """`lengths`: tokens of each row; a batch holds at most `capacity` tokens, a longer row is alone (and cut)."""
        packed: list[list[int]] = []
        room = 0
        for row, length in enumerate(lengths):
            if not packed or length > room:
                packed.append([])
                room = capacity
            packed[-1].append(row)
            room -= length
        packed += [[]] * (-len(packed) % world_size)
        self._batches = packed[rank::world_size]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)


def loader(validation: Any, job: Job, rank: int, world_size: int) -> DataLoader[Any]:
    """This rank's batches of the first `drafter.replay_rows` rows of a validation loader, with its settings."""
    lengths = validation.dataset.lengths()[: job.drafter.replay_rows]
    return DataLoader(
        validation.dataset,
        batch_sampler=InOrder(lengths, job.drafter.sequence_length, rank, world_size),
        num_workers=validation.num_workers,
        prefetch_factor=validation.prefetch_factor,
        pin_memory=validation.pin_memory,
        collate_fn=validation.collate_fn,
        persistent_workers=validation.persistent_workers,
        multiprocessing_context=validation.multiprocessing_context,
        worker_init_fn=validation.worker_init_fn,
    )
