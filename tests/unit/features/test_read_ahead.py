"""Read-ahead: every sample is announced once an epoch, before its batch and no further ahead than asked."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

from slipstream.features.read_ahead import ReadAhead, will_need

LENGTHS = [3, 9, 4, 7, 2, 8, 5, 6, 1, 9]


def sampler() -> MultipackDistributedBatchSamplerV2:
    """speculators' own, with batches of one to several samples."""
    return MultipackDistributedBatchSamplerV2(batch_max_length=12, lengths=LENGTHS, num_replicas=1, rank=0, seed=3)


def wait_for(heard: list[int], count: int) -> list[int]:
    """The announcements once there are `count`, and a moment later none more."""
    deadline = time.monotonic() + 5
    while len(heard) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)
    return list(heard)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("samples", [0, 3, 100])
def test_batches_are_speculators_own_and_announced_in_time(epoch: int, samples: int) -> None:
    expected = sampler()
    expected.set_epoch(epoch)
    batches = [list(map(int, batch)) for batch in expected]
    order = [sample for batch in batches for sample in batch]
    heard: list[int] = []
    ahead = ReadAhead(sampler(), samples, heard.append)
    ahead.set_epoch(epoch)
    assert len(ahead) == len(batches)
    handed_out = 0
    for batch, wanted in zip(ahead, batches, strict=True):
        assert list(map(int, batch)) == wanted
        handed_out += len(wanted)
        due = order[: handed_out + samples]
        assert wait_for(heard, len(due)) == due
    assert heard == order


def test_a_pass_that_is_given_up_announces_no_more() -> None:
    gate, heard = threading.Event(), []

    def announce(sample: int) -> None:
        gate.wait(5)
        heard.append(sample)

    batches = iter(ReadAhead(sampler(), 100, announce))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    gate.set()
    assert len(wait_for(heard, 1)) <= 1


def resident(path: Path) -> float:
    """The share of a file's pages that is in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as data:
        view = np.frombuffer(data, dtype=np.uint8)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), pages) == 0
        del view
        return float(np.mean(np.frombuffer(pages, dtype=np.uint8) & 1))


def test_the_kernel_reads_what_it_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "sample"
    path.write_bytes(os.urandom(1 << 22))
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if resident(path) > 0.5:
        pytest.skip("this file system keeps its pages")
    will_need(path)
    deadline = time.monotonic() + 5
    while (share := resident(path)) < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert share == 1


def test_a_file_that_is_gone_is_the_readers_error(tmp_path: Path) -> None:
    will_need(tmp_path / "nowhere")
