"""Read-ahead: the files of the next samples are on their way into the page cache before a data worker opens them.

The order of an epoch is known when it begins.  The training process hands batches to its workers through a sampler;
`ReadAhead` wraps it and tells the kernel (`posix_fadvise`, WILLNEED) about the samples that lie `samples` ahead of the
batch it hands out, from a thread of its own, because the call may wait for the disk's queue.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.utils.data import Sampler


def will_need(path: Path) -> None:
    """Asks the kernel to read the file into the page cache; a file that is not there is somebody else's error."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(fd)


class ReadAhead(Sampler[list[int]]):
    """The batches of `sampler`, in its order, each sample announced once an epoch, `samples` ahead of its batch.

    `announce` takes an index as the sampler gives it.
    """

    def __init__(self, sampler: Any, samples: int, announce: Callable[[int], None]) -> None:
        self._sampler, self._samples, self._announce = sampler, samples, announce

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass, as speculators' sampler does."""
        self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(self._sampler)
        order = [int(sample) for batch in batches for sample in batch]
        announced = handed_out = 0
        aside = ThreadPoolExecutor(1, "read-ahead")
        try:
            for batch in batches:
                handed_out += len(batch)
                for sample in order[announced : handed_out + self._samples]:
                    aside.submit(self._announce, sample)
                announced = handed_out + self._samples
                yield batch
        finally:
            aside.shutdown(wait=False, cancel_futures=True)
