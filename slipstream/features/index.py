"""The Parquet index of captured samples: one row a sample, of a shard and of the whole store.

| column | |
|---|---|
| row | int64: number in the store (`hs_<row>`), in a shard's index the row of the traces |
| trace, split | string: the trace's key and split |
| key | string: digest of the token ids, the name in the row pool |
| tokens, size | int64: length of the sample, bytes of its file |
| checksum | string: XXH3-128 of the file's bytes |
| dtype | string: torch name of the stored type |
| minimum, maximum | double: range of the values |
| non_finite | int64: NaN and infinities; 0, for a sample that holds one is never stored |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream import atomic
from slipstream.features.sample import SampleInfo

if TYPE_CHECKING:
    import pyarrow as pa

FILE = "index.parquet"


@dataclass(frozen=True)
class Entry:
    """One sample of an index."""

    row: int
    trace: str
    split: str
    key: str
    sample: SampleInfo


def schema() -> pa.Schema:
    """The columns above."""
    import pyarrow as pa

    text, whole, real = pa.string(), pa.int64(), pa.float64()
    fields = [("row", whole), ("trace", text), ("split", text), ("key", text), ("tokens", whole), ("size", whole)]
    fields += [("checksum", text), ("dtype", text), ("minimum", real), ("maximum", real), ("non_finite", whole)]
    return pa.schema(fields)


def write(path: Path, entries: Iterable[Entry], dtype: str) -> None:
    """Writes the index atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "row": entry.row,
            "trace": entry.trace,
            "split": entry.split,
            "key": entry.key,
            "tokens": entry.sample.tokens,
            "size": entry.sample.file.size,
            "checksum": entry.sample.file.checksum,
            "dtype": dtype,
            "minimum": entry.sample.minimum,
            "maximum": entry.sample.maximum,
            "non_finite": 0,
        }
        for entry in entries
    ]
    with atomic.replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema()), temporary, compression="zstd")
