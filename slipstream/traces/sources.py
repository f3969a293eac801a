"""Where prompts are read from: files, saved data sets, the Hugging Face Hub; row by row, never a whole source.

A bad row is set aside with its file, row, id and reason and the others go on.  A source that cannot be read at all
is an InputError.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from slipstream.artifact import checksum
from slipstream.config import Source
from slipstream.digest import digest
from slipstream.errors import InputError
from slipstream.traces.json_array import elements
from slipstream.traces.prompts import BadRow, Prompt, parse

if TYPE_CHECKING:
    import datasets

SUFFIXES = frozenset({".jsonl", ".json", ".parquet"})
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
CHUNK = 1 << 20  # bytes
PARQUET_ROWS = 256  # rows decoded at once
MAPPED_BYTES = 8 << 20


@dataclass(frozen=True)
class Reject:
    """A row that was set aside: where it stands (row counts from 1) and why."""

    file: str
    row: int
    id: str | None
    reason: str


def on_hub(source: Source) -> bool:
    """Whether a source is a data set on the Hub: called `org/name`, and nothing of that name lies here."""
    path = Path(source.path)
    return HUB_NAME.fullmatch(source.path) is not None and path.suffix not in SUFFIXES and not path.exists()


def read(source: Source) -> Iterator[Prompt | Reject]:
    """The prompts of a source and the rows that are none, in the order in which they stand.

    Raises InputError when the source cannot be read.
    """
    domain = source.domain or "all"
    for number, row in rows(source):
        try:
            if isinstance(row, BadRow):
                raise row
            prompt = parse(row, domain)
        except BadRow as error:
            declared = row.get("id") if isinstance(row, dict) else None
            named = str(declared) if isinstance(declared, str | int | float) else None
            yield Reject(source.path, number, named, str(error))
        else:
            yield replace(prompt, file=source.path, row=number)


def rows(source: Source) -> Iterator[tuple[int, Any]]:
    """Row number (from 1) and decoded row, or the BadRow it is; raises InputError when the source is unreadable."""
    if on_hub(source):
        yield from enumerate(_mapped(_load_from_hub(source)), 1)
        return
    path = _existing(source)
    if not path.is_dir() and path.suffix not in SUFFIXES:
        raise InputError(f"{path}: unknown kind of prompt file; use .jsonl, .parquet or a saved data set folder")
    try:
        if path.is_dir():
            yield from enumerate(_mapped(_load_from_disk(source)), 1)
        elif path.suffix == ".parquet":
            yield from enumerate(_parquet(path), 1)
        else:
            yield from _json(path)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{source.path}: unreadable prompt file ({type(error).__name__}: {error})") from error


def source_digest(source: Source) -> str:
    """A digest of a source's content: a copy elsewhere is the same source, other bytes under its name are not.

    Raises InputError when the source cannot be read.
    """
    if on_hub(source):
        return _hub_digest(source)
    path = _existing(source)
    try:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        return digest([[p.name, checksum(p)] for p in files] if path.is_dir() else checksum(path))
    except OSError as error:
        raise InputError(f"{source.path}: unreadable prompt file ({error.strerror or error})") from error


def _existing(source: Source) -> Path:
    path = Path(source.path)
    if not path.exists():
        raise InputError(f"{source.path}: no such prompt file; set prompts.sources to files that exist here")
    return path


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        array = path.suffix == ".json" and file.read(CHUNK).lstrip().startswith(b"[")
        file.seek(0)
        texts = elements(iter(lambda: file.read(CHUNK), b"")) if array else file
        for number, text in enumerate(texts, 1):
            if text.strip():
                yield number, _decoded(text)


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        return BadRow("not UTF-8")
    except ValueError as error:
        return BadRow(f"not JSON ({error})")
    except RecursionError:
        return BadRow("nested too deeply")


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    # with a buffer, column chunks are streamed instead of read whole
    for batch in pq.ParquetFile(path, buffer_size=CHUNK).iter_batches(PARQUET_ROWS):
        yield from batch.to_pylist()


def _load_from_disk(source: Source) -> datasets.Dataset:
    import datasets

    loaded = datasets.load_from_disk(source.path)
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if source.split in loaded:
        return loaded[source.split]
    problem = f"has no split {source.split}" if source.split else "holds several splits"
    raise InputError(f"{source.path}: {problem}; set the source's `split` to one of {', '.join(loaded)}")


def _load_from_hub(source: Source) -> datasets.Dataset:
    import datasets

    split = source.split or "train"
    try:
        return datasets.load_dataset(source.path, source.subset, split=split, revision=source.revision)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"{source.path}: no such file here, and as a data set of the Hugging Face Hub it does not load ({reason}); "
            "correct the source, download the data set while online, or set the source's path to a file"
        ) from error


def _hub_digest(source: Source) -> str:
    dataset = _load_from_hub(source)
    try:
        content = [checksum(Path(file["filename"])) for file in dataset.cache_files]
    except OSError as error:
        raise InputError(f"{source.path}: unreadable cache of the data set ({error.strerror or error})") from error
    if not content:  # HF_DATASETS_IN_MEMORY_MAX_SIZE
        content = [xxhash.xxh3_128_hexdigest(batch.serialize()) for batch in dataset.data.to_batches()]
    return digest({"split": source.split or "train", "content": content})


def _mapped(dataset: datasets.Dataset) -> Iterator[Any]:
    """The rows of a memory-mapped data set.

    It is mapped anew every 8 MB: until a mapping ends, all pages that were read through it count as this
    process's memory.
    """
    if not dataset.cache_files:
        yield from dataset
        return
    step = max(1, len(dataset) * MAPPED_BYTES // max(1, dataset.data.nbytes))
    unmapped = pickle.dumps(dataset)  # paths, not rows
    for start in range(0, len(dataset), step):
        yield from pickle.loads(unmapped).select(range(start, min(start + step, len(dataset))))
