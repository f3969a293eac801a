"""The features stage, second half: what the shards captured becomes one folder that speculators trains on as it is.

    features/<key>/
      data-*.arrow, dataset_info.json, state.json   `datasets` directory: input_ids, loss_mask (unshifted), seq_len
      hidden_states/hs_<row>.safetensors            hard links into the row pool
      index.parquet                                 one row a sample (columns: `index`)
      lost.jsonl                                    rows that could not be captured

Training rows come first, then validation rows: speculators splits by position.  With `features.store: none` there are
no hidden states: the rows are the same, and the trainer asks a server for them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import atomic
from slipstream.artifact import Artifact, FileRecord, claim, stage_key
from slipstream.config import RunConfig
from slipstream.digest import digest
from slipstream.features import disk, index
from slipstream.features.index import Entry
from slipstream.features.pool import FeaturePool
from slipstream.features.recipe import open_pool, recipe
from slipstream.features.rows import Row, dropped_tokens, read_rows
from slipstream.features.sample import SampleInfo
from slipstream.features.shard_stage import LOST
from slipstream.traces import splits

STAGE, VERSION = "features", 2
HIDDEN_STATES = "hidden_states"
DATASET = ".dataset-"  # where the data set is written before its files take their names


@dataclass(frozen=True)
class _Kept:
    """A row of the store and its sample, None where nothing is stored."""

    row: Row
    sample: SampleInfo | None


def _recipe(config: RunConfig) -> dict[str, Any]:
    return {**recipe(config), "store": config.features.store, "dropped_tokens": dropped_tokens(config)}


def key(config: RunConfig, traces: Artifact) -> str:
    """The folder key of the assembled features."""
    return stage_key(STAGE, VERSION, _recipe(config), {"traces": traces.content})


def assemble(
    workdir: Path,
    config: RunConfig,
    traces: Artifact,
    shards: Sequence[Artifact],
    on_wait: Callable[[str], None] | None = None,
) -> Artifact:
    """Selects the rows from the pool into one folder in row order; copies no states."""
    made, inputs = _recipe(config), {"traces": traces.content}
    name = stage_key(STAGE, VERSION, made, inputs)
    with disk.explained(workdir), claim(workdir, STAGE, name, on_wait) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        for killed in folder.path.glob(f"{DATASET}*"):
            shutil.rmtree(killed)
        files: dict[str, FileRecord | None] = {index.FILE: None, LOST: None}
        with closing(open_pool(workdir, config)) as pool:
            if config.features.store == "none":
                kept, lost, linked = [_Kept(row, None) for row in read_rows(config, traces)], [], 0
            else:
                rows = [_Kept(row, pool.find(row.token_ids)) for row in read_rows(config, traces)]
                kept, lost = [row for row in rows if row.sample], [row.row for row in rows if not row.sample]
                linked = _link(folder.path / HIDDEN_STATES, kept, pool)
            entries = [
                Entry(number, item.row.trace, item.row.split, item.row.key, item.sample)
                for number, item in enumerate(kept)
                if item.sample
            ]
            index.write(folder.path / index.FILE, entries, pool.form.dtype)
        _write_dataset(folder.path, traces, kept, dropped_tokens(config))
        atomic.write_lines(folder.path / LOST, [{"row": row.number, "trace": row.trace} for row in lost])
        files |= {path.name: None for path in folder.path.iterdir() if path.suffix in {".arrow", ".json"}}
        files |= {f"{HIDDEN_STATES}/hs_{entry.row}.safetensors": entry.sample.file for entry in entries}
        return folder.commit(
            version=VERSION,
            recipe=made,
            inputs=inputs,
            content=digest([recipe(config), [[item.row.key, item.row.split, item.row.prompt_tokens] for item in kept]]),
            files=files,
            counts={
                "rows": len(kept),
                **{split: sum(item.row.split == split for item in kept) for split in (splits.TRAIN, splits.VALIDATION)},
                "lost": len(lost),
                "tokens": sum(len(item.row.token_ids) for item in kept),
                "bytes": sum(entry.sample.file.size for entry in entries),
                "shards": len(shards),
            },
            work={"linked": linked},
        )


def _link(folder: Path, kept: Sequence[_Kept], pool: FeaturePool) -> int:
    """Makes `folder` hold exactly one link a kept row; returns how many were made anew."""
    folder.mkdir(exist_ok=True)
    expected = {f"hs_{i}.safetensors" for i in range(len(kept))}
    for path in folder.iterdir():
        if path.name not in expected:
            path.unlink()
    made = 0
    for i, item in enumerate(kept):
        source, target = pool.path(item.row.key), folder / f"hs_{i}.safetensors"
        if target.exists() and target.samefile(source):
            continue
        made += 1
        temporary = folder / f".link{atomic.SUFFIX}"
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)  # durable when `commit` syncs the folder: the content is already
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(source, temporary)
            atomic.fsync_file(temporary)
        os.replace(temporary, target)
    return made


def _write_dataset(folder: Path, traces: Artifact, kept: Sequence[_Kept], dropped: int) -> None:
    """The `datasets` directory: int64 input_ids and loss_mask, seq_len, in the order of `kept`; torch format."""
    import datasets
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pq.read_table(traces.folder / "traces.parquet", columns=["input_ids", "loss_mask"])
    table = table.take(pa.array([item.row.number for item in kept], type=pa.int64()))
    wide = pa.list_(pa.int64())
    columns = {name: table[name].cast(wide) for name in ("input_ids", "loss_mask")}
    if dropped:
        columns = {
            name: pa.array([row[:-dropped] for row in column.to_pylist()], wide) for name, column in columns.items()
        }
    columns["seq_len"] = pc.list_value_length(columns["input_ids"]).cast(pa.int64())
    dataset = datasets.Dataset(pa.table(columns))
    dataset.set_format("torch")
    with tempfile.TemporaryDirectory(dir=folder, prefix=DATASET) as temporary:
        dataset.save_to_disk(temporary)
        for path in Path(temporary).iterdir():
            os.replace(path, folder / path.name)
