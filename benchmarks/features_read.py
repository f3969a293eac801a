"""Reading a feature store: deep verification and the checked loader against plain reading and speculators' reader.

    python benchmarks/features_read.py [--samples 72] [--rounds 5] [--warm] [--folder DIR]

Writes benchmarks/results/features_read.json.  Makes a store of 1,024-token samples as wide as Kimi-K2.5's (four states
of 7,168 bfloat16 values: 58.7 MB each) in a temporary folder, and a quarter as many in float8.  Every round runs
all readers in turn on the same number of threads, the next round in the opposite order, the page cache emptied of
the files before each (`posix_fadvise`, DONTNEED) and that checked with mincore:

* `plain`: every file's bytes into one reused buffer a thread, pieces of 1 MiB
* `deep_verify`: `slipstream.artifact.verify(folder, deep=True)`
* `loader`: `StoreTransfer.get_cached` of every row, every checksum compared
* `loader_batch`, `speculators_batch`: the same, with the read-ahead that training has (AHEAD samples), and
  hs-connectors' `FileTransfer.get_cached`, each sample copied into a batch as speculators' collation does, since what
  `FileTransfer` gives is only mapped and not yet read
* `fp8_loader_batch`, `fp8_speculators_batch`: the same on the float8 store, dequantised (by `FP8Transfer`)

Ratios are of medians over the rounds.  `--warm` reads again with everything in the page cache, without the disk as
the common limit.  Needs torch, safetensors, xxhash, numpy, pyarrow, pydantic, hs_connectors.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import mmap
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hs_connectors import FileTransfer, FP8Transfer
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slipstream import artifact  # noqa: E402
from slipstream.digest import digest_tokens  # noqa: E402
from slipstream.features import index  # noqa: E402
from slipstream.features.index import Entry  # noqa: E402
from slipstream.features.loader import StoreTransfer  # noqa: E402
from slipstream.features.read_ahead import ReadAhead, will_need  # noqa: E402
from slipstream.features.sample import FP8, SampleInfo  # noqa: E402

TOKENS, LAYERS, HIDDEN = 1024, 4, 7168
AHEAD = 8
PIECE = 1 << 20
SPEED_OF = {"loader_batch": "bfloat16", "fp8_loader_batch": FP8}  # reader: store
_mine = threading.local()


def make_store(workdir: Path, samples: int, dtype: str) -> artifact.Artifact:
    """A features artifact of random states; the bytes on the disk differ from file to file."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, LAYERS, HIDDEN, generator=generator).to(torch.bfloat16)
    with artifact.claim(workdir, "features", dtype) as folder:
        (folder.path / "hidden_states").mkdir()
        entries = []
        for row in range(samples):
            token_ids = torch.randint(0, 160_000, (TOKENS,), generator=generator)
            tensors = {"hidden_states": states.roll(row + 1, 0), "token_ids": token_ids}
            if dtype == FP8:
                codes, scales = quantize_tensor_to_fp8(tensors["hidden_states"])
                tensors |= {"hidden_states": codes, "hidden_states_scales": scales}
            path = folder.path / f"hidden_states/hs_{row}.safetensors"
            save_file(tensors, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            info = SampleInfo(artifact.file_record(path), TOKENS, -1.0, 1.0)
            entries.append(Entry(row, f"t{row}", "train", digest_tokens(token_ids.tolist()), info))
        index.write(folder.path / index.FILE, entries, dtype)
        files: dict[str, artifact.FileRecord | None] = {
            f"hidden_states/hs_{entry.row}.safetensors": entry.sample.file for entry in entries
        }
        files[index.FILE] = None
        return folder.commit(version=1, recipe={}, inputs={}, content=dtype, files=files)


def samples_of(made: artifact.Artifact) -> list[Path]:
    """The sample files, by row."""
    folder = made.folder / "hidden_states"
    return [folder / f"hs_{row}.safetensors" for row in range(len(list(folder.iterdir())))]


def drop(paths: Sequence[Path]) -> None:
    """Takes the files out of the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def resident(paths: Sequence[Path]) -> float:
    """The share of the files' pages that is in the page cache."""
    libc, held, total = ctypes.CDLL(None, use_errno=True), 0, 0
    for path in paths:
        size = path.stat().st_size
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as data:
            view = np.frombuffer(data, dtype=np.uint8)
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            if libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), pages):
                raise OSError(ctypes.get_errno(), "mincore")
            del view
            held += int((np.frombuffer(pages, dtype=np.uint8) & 1).sum())
            total += len(pages)
    return held / total


def read_plainly(path: Path) -> None:
    """Every byte once, into memory that is there already."""
    if not hasattr(_mine, "buffer"):
        _mine.buffer = memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while file.readinto(_mine.buffer):
            pass


def collated(sample: dict[str, torch.Tensor] | None) -> None:
    """Into the batch, as speculators' collation copies it: a mapped tensor's bytes are read only then."""
    assert sample is not None
    if not hasattr(_mine, "batch"):
        _mine.batch = torch.empty(TOKENS, LAYERS, HIDDEN, dtype=torch.bfloat16)
    _mine.batch.copy_(sample["hidden_states"])


def on_threads(threads: int, one: Callable[[Any], object], items: Sequence[Any]) -> None:
    """`one` for every item."""
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(one, items):
            pass


def as_trained(threads: int, one: Callable[[int], object], paths: Sequence[Path]) -> None:
    """`one` for every row, in order, with the read-ahead that training has."""
    order = iter(ReadAhead([[row] for row in range(len(paths))], AHEAD, lambda row: will_need(paths[row])))
    turn = threading.Lock()

    def work(_: int) -> None:
        while True:
            with turn:
                rows = next(order, [])
            if not rows:
                return
            one(rows[0])

    on_threads(threads, work, range(threads))


def verify_deep(made: artifact.Artifact) -> None:
    """The verification that `slipstream verify --deep` does."""
    assert artifact.verify(made.folder, deep=True) == []


def readers(native: artifact.Artifact, fp8: artifact.Artifact, threads: int) -> dict[str, tuple[Any, list[Path]]]:
    """By name: a function that reads a store once, and the files it reads."""
    paths, paths8 = samples_of(native), samples_of(fp8)
    rows, rows8 = range(len(paths)), range(len(paths8))
    ours, ours8 = StoreTransfer(native.folder), StoreTransfer(fp8.folder)
    theirs, theirs8 = FileTransfer(native.folder / "hidden_states"), FP8Transfer(fp8.folder / "hidden_states")
    return {
        "plain": (lambda: on_threads(threads, read_plainly, paths), paths),
        "deep_verify": (lambda: verify_deep(native), paths),
        "loader": (lambda: on_threads(threads, ours.get_cached, rows), paths),
        "loader_batch": (lambda: as_trained(threads, lambda row: collated(ours.get_cached(row)), paths), paths),
        "speculators_batch": (lambda: on_threads(threads, lambda row: collated(theirs.get_cached(row)), rows), paths),
        "fp8_loader_batch": (lambda: as_trained(threads, lambda row: collated(ours8.get_cached(row)), paths8), paths8),
        "fp8_speculators_batch": (
            lambda: on_threads(threads, lambda row: collated(theirs8.get_cached(row)), rows8),
            paths8,
        ),
    }


def gb_per_s(read: Callable[[], None], paths: Sequence[Path]) -> float:
    """Speed of one pass over the files."""
    size = sum(path.stat().st_size for path in paths)
    began = time.perf_counter()
    read()
    return size / 1e9 / (time.perf_counter() - began)


def measured(known: dict[str, tuple[Any, list[Path]]], rounds: int, cold: bool) -> tuple[dict[str, list[float]], float]:
    """GB/s by reader and round, and the largest share of a reader's files that was cached before it began."""
    speeds: dict[str, list[float]] = {name: [] for name in known}
    left = 0.0
    for number in range(rounds):
        order = list(known) if number % 2 == 0 else list(reversed(known))
        for name in order:
            read, paths = known[name]
            if cold:
                drop(paths)
                left = max(left, resident(paths))
            else:
                on_threads(4, read_plainly, paths)
            speeds[name].append(round(gb_per_s(read, paths), 3))
    return speeds, left


def ratios(speeds: dict[str, list[float]]) -> dict[str, float]:
    """The claims, from the medians."""
    median = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "deep_verify_over_read": round(median["deep_verify"] / median["plain"], 3),
        "loader_over_read": round(median["loader"] / median["plain"], 3),
        "loader_over_speculators": round(median["loader_batch"] / median["speculators_batch"], 3),
        "fp8_loader_over_speculators": round(median["fp8_loader_batch"] / median["fp8_speculators_batch"], 3),
    }


def versions() -> dict[str, str]:
    """Of what takes part."""
    names = ("torch", "safetensors", "xxhash", "numpy", "pyarrow", "hs-connectors")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=72)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", action="store_true", help="also with everything in the page cache")
    parser.add_argument("--folder", type=Path, default=None, help="where the store is made; removed afterwards")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/features_read.json")
    given = parser.parse_args()
    threads = min(8, os.cpu_count() or 1)  # those of the deep verification
    torch.set_num_threads(1)  # as in data workers
    workdir = Path(tempfile.mkdtemp(prefix="features-read-", dir=given.folder))
    try:
        native = make_store(workdir, given.samples, "bfloat16")
        fp8 = make_store(workdir, max(threads, given.samples // 4), FP8)
        known = readers(native, fp8, threads)
        cold, left = measured(known, given.rounds, cold=True)
        warm, _ = measured(known, given.rounds if given.warm else 0, cold=False)
        sizes = {made.key: samples_of(made)[0].stat().st_size for made in (native, fp8)}
    finally:
        shutil.rmtree(workdir)
    each_s = {name: sizes[kind] / 1e9 / statistics.median(cold[name]) for name, kind in SPEED_OF.items()}
    result = {
        "command": f"python benchmarks/features_read.py --samples {given.samples} --rounds {given.rounds}",
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "versions": versions(),
        "threads": threads,
        "samples": given.samples,
        "sample_bytes": sizes["bfloat16"],
        "store_bytes": sizes["bfloat16"] * given.samples,
        "cached_before_reading": round(left, 4),
        "gb_per_s": {"cold": cold, "warm": warm},
        **ratios(cold),
        **({"warm": ratios(warm)} if given.warm else {}),
        "fp8_bytes_over_bf16": round(sizes[FP8] / sizes["bfloat16"], 4),
        "tokens_per_s": {name: round(TOKENS / value) for name, value in each_s.items()},
        "fp8_tokens_per_s_over_bf16": round(each_s["loader_batch"] / each_s["fp8_loader_batch"], 3),
    }
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
