"""The second pass: every sample's states into the row pool, several at a time, each checked as a captured one is.

A file that has the pool's form already is copied beside the pool and moved in, for every other form its tensors are
written anew.  Never a hard link: what is found damaged later is emptied under all its names, and the store is not ours.
A store that lists checksums is held to them.  What is in the pool is not looked at again, so a run that was killed
continues where it was; only what a failed probe left there is replaced.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from slipstream.artifact import MANIFEST, checksum
from slipstream.features import vouched
from slipstream.features.extraction import process_name
from slipstream.features.pool import FeaturePool
from slipstream.features.sample import BadSample
from slipstream.features.servers import sweep
from slipstream.imports.found import Sample, Store
from slipstream.imports.survey import Row, Survey

THREADS = 4  # each holds one sample: 0.5 GB for 8,192 tokens of 57,344 bytes


@contextmanager
def incoming(workdir: Path) -> Iterator[Path]:
    """A folder on the pool's file system, removed in the end, and those of killed runs before."""
    folder = workdir / "pool" / "features" / "incoming" / f"{process_name()}-import"
    sweep(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def adopt(
    workdir: Path,
    store: Store,
    survey: Survey,
    positions: Sequence[int],
    pool: FeaturePool,
    on_sample: Callable[[int, int], None],
) -> int:
    """Takes the states at these positions of every usable sample into the pool; returns how many it did not have.

    What fails the checks is set aside in the survey, with the reason.
    """
    total, done, made = survey.count(), 0, 0
    doubted = vouched.doubted(pool.folder, [row.key for row in survey.usable()])
    bad: list[tuple[str, str]] = []
    with incoming(workdir) as folder, ThreadPoolExecutor(THREADS) as threads:
        waiting: deque[tuple[str, Future[bool]]] = deque()

        def finish() -> None:
            nonlocal done, made
            name, future = waiting.popleft()
            try:
                made += future.result()
            except BadSample as error:
                bad.append((name, str(error)))
            done += 1
            on_sample(done, total)

        for row in survey.usable():
            waiting.append((row.sample.name, threads.submit(_one, folder, store, row, positions, pool, doubted)))
            if len(waiting) > 2 * THREADS:
                finish()
        while waiting:
            finish()
    for name, reason in bad:
        survey.reject(name, reason)
    return made


def _one(
    folder: Path, store: Store, row: Row, positions: Sequence[int], pool: FeaturePool, doubted: Collection[str]
) -> bool:
    tokens = row.sample.token_ids.tolist()
    if pool.find(tokens) is not None and row.key not in doubted:
        return False
    if (wanted := store.checksums.get(row.sample.name)) is not None:
        found = checksum(store.folder / row.sample.name)  # in the page cache for the copy
        if found != wanted:
            raise BadSample(f"checksum {found} instead of {wanted} in the store's {MANIFEST}")
    written = folder / f"{row.sample.number}.safetensors"
    try:
        _bring(written, store, row.sample, positions)
        pool.add(tokens, written)
    finally:
        written.unlink(missing_ok=True)
    return True


def _bring(written: Path, store: Store, sample: Sample, positions: Sequence[int]) -> None:
    """Makes `written` a file of the pool's form."""
    from safetensors.torch import save_file

    source = store.file(sample)
    if source is not None and list(positions) == list(range(sample.layers)):
        shutil.copyfile(source, written)
        return
    held = store.states(sample).select(list(positions))
    save_file(held | {"token_ids": torch.from_numpy(sample.token_ids.copy())}, written)
