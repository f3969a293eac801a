"""The features stage: shards captured into the row pool, then one folder that speculators trains on as it is.

    features/<key>/
      data-*.arrow, dataset_info.json, state.json   `datasets` directory: input_ids, loss_mask (unshifted), seq_len
      hidden_states/hs_<row>.safetensors            hard links into the row pool
      index.parquet                                 row, trace, split, tokens, size, checksum, range of values
      lost.jsonl                                    rows that could not be captured, with the reason

Training rows come first, then validation rows: speculators splits by position.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import atomic, verifier
from slipstream.artifact import Artifact, FileRecord, claim, stage_key
from slipstream.config import RunConfig
from slipstream.digest import digest, digest_tokens
from slipstream.errors import StageFailed
from slipstream.features import capture
from slipstream.features.pool import FeaturePool
from slipstream.features.sample import SampleInfo
from slipstream.features.shards import Shard, split_rows
from slipstream.progress import Report
from slipstream.serving import Endpoint
from slipstream.traces import splits
from slipstream.traces import table as traces_table

STAGE, SHARD_STAGE, VERSION = "features", "feature-shards", 1
CONVENTION = "id k is the residual stream before layer k; the last id is the final state, before the final norm"
HIDDEN_STATES = "hidden_states"


@dataclass(frozen=True)
class Lease:
    """An extraction server that one shard may use, and the folder it writes into."""

    endpoint: Endpoint
    storage: Path


Lend = Callable[[], AbstractContextManager[Lease]]


def recipe(config: RunConfig) -> dict[str, Any]:
    """What decides the states of a token sequence, besides the sequence."""
    shape = verifier.load_shape(config.verifier)
    return {
        "verifier": verifier.identity(config.verifier),
        "dtype": config.verifier.dtype,
        "layer_ids": verifier.capture_ids(config.features.layer_ids, shape),
        "hidden_size": shape.hidden_size,
        "convention": CONVENTION,
    }


def open_pool(workdir: Path, config: RunConfig) -> FeaturePool:
    """The row pool of this configuration's recipe."""
    made = recipe(config)
    return FeaturePool(workdir, digest(made), len(made["layer_ids"]), made["hidden_size"], made["dtype"])


def plan(config: RunConfig, traces: Artifact) -> list[Shard]:
    """The row ranges to capture."""
    lengths = [len(row["input_ids"]) for row in traces_table.read(traces, ["input_ids"])]
    return split_rows(lengths, config.features.shards)


def _rows(traces: Artifact, shard: Shard) -> list[tuple[int, list[int]]]:
    rows = enumerate(traces_table.read(traces, ["input_ids"]))
    return [(number, row["input_ids"]) for number, row in rows if shard.start <= number < shard.stop]


def _shard_inputs(rows: Sequence[tuple[int, Sequence[int]]]) -> dict[str, str]:
    return {"rows": digest([digest_tokens(token_ids) for _, token_ids in rows])}


def shard_key(config: RunConfig, traces: Artifact, shard: Shard) -> str:
    """The folder key of a shard: it follows the token sequences, not their row numbers."""
    return stage_key(SHARD_STAGE, VERSION, recipe(config), _shard_inputs(_rows(traces, shard)))


def capture_shard(
    workdir: Path, config: RunConfig, traces: Artifact, shard: Shard, lend: Lend, report: Report
) -> Artifact:
    """Captures the shard's samples that the pool lacks; `lend` is entered only when there are any.

    Raises StageFailed when a larger share than `features.max_lost_share` could not be captured.
    """
    rows = _rows(traces, shard)
    inputs, made = _shard_inputs(rows), recipe(config)
    name = stage_key(SHARD_STAGE, VERSION, made, inputs)
    with claim(workdir, SHARD_STAGE, name) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        with closing(open_pool(workdir, config)) as pool:
            missing = [(number, token_ids) for number, token_ids in rows if pool.find(token_ids) is None]
            outcome = capture.Outcome()
            if missing:
                with lend() as lease:
                    outcome = capture.capture(missing, lease.endpoint, lease.storage, pool, config.features, report)
            found = {number: pool.find(token_ids) for number, token_ids in rows}
            samples = {digest_tokens(ids): found[number] for number, ids in rows if found[number] is not None}
            lost = [
                {"key": digest_tokens(ids), "reason": outcome.lost.get(number, "not in the pool")}
                for number, ids in rows
                if found[number] is None
            ]
            _write_lines(folder.path / "lost.jsonl", lost)
            if len(lost) > config.features.max_lost_share * len(rows):
                raise StageFailed(
                    f"features: {len(lost)} of {len(rows)} samples of shard {shard.index} could not be captured, more "
                    f"than max_lost_share {config.features.max_lost_share:g}; the first: {lost[0]['reason']}"
                )
            files: dict[str, FileRecord | None] = {"lost.jsonl": None}
            for key, info in samples.items():
                if info is not None:
                    files[os.path.relpath(pool.path(key), folder.path)] = info.file
        return folder.commit(
            version=VERSION,
            recipe=made,
            inputs=inputs,
            content=digest(sorted(samples)),
            files=files,
            counts={"samples": len(samples), "lost": len(lost)},
            work={
                "captured": outcome.captured,
                "reused": len(rows) - len(missing),
                "captured_tokens": outcome.tokens,
                "tokens_per_s": round(outcome.tokens / outcome.seconds, 1) if outcome.seconds else None,
            },
        )


def key(config: RunConfig, traces: Artifact) -> str:
    """The folder key of the assembled features."""
    return stage_key(STAGE, VERSION, recipe(config), {"traces": traces.content})


def assemble(
    workdir: Path,
    config: RunConfig,
    traces: Artifact,
    shards: Sequence[Artifact],
    on_wait: Callable[[str], None] | None = None,
) -> Artifact:
    """Selects the rows from the pool into one folder in row order; copies no states."""
    made, inputs = recipe(config), {"traces": traces.content}
    name = stage_key(STAGE, VERSION, made, inputs)
    with claim(workdir, STAGE, name, on_wait) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        with closing(open_pool(workdir, config)) as pool:
            rows = list(_index(traces, pool))
            linked = _link(folder.path / HIDDEN_STATES, rows, pool)
        kept = [row for row in rows if row["sample"] is not None]
        _write_dataset(folder.path, traces, [row["trace"] for row in kept])
        _write_index(folder.path / "index.parquet", kept)
        lost = [{"row": row["source"], "trace": row["trace"]} for row in rows if row["sample"] is None]
        _write_lines(folder.path / "lost.jsonl", lost)
        files: dict[str, FileRecord | None] = {"index.parquet": None, "lost.jsonl": None}
        files |= {path.name: None for path in folder.path.iterdir() if path.suffix in {".arrow", ".json"}}
        files |= {f"{HIDDEN_STATES}/hs_{i}.safetensors": row["sample"].file for i, row in enumerate(kept)}
        tokens = sum(row["sample"].tokens for row in kept)
        size = sum(row["sample"].file.size for row in kept)
        return folder.commit(
            version=VERSION,
            recipe=made,
            inputs=inputs,
            content=digest([made, [[row["key"], row["split"], row["prompt_tokens"]] for row in kept]]),
            files=files,
            counts={
                "rows": len(kept),
                **{split: sum(row["split"] == split for row in kept) for split in (splits.TRAIN, splits.VALIDATION)},
                "lost": len(lost),
                "tokens": tokens,
                "bytes": size,
                "shards": len(shards),
            },
            work={"linked": linked},
        )


def _index(traces: Artifact, pool: FeaturePool) -> Iterator[dict[str, Any]]:
    columns = ["key", "split", "input_ids", "prompt_tokens"]
    for source, row in enumerate(traces_table.read(traces, columns)):
        sample: SampleInfo | None = pool.find(row["input_ids"])
        yield {
            "source": source,
            "trace": row["key"],
            "split": row["split"],
            "prompt_tokens": row["prompt_tokens"],
            "key": digest_tokens(row["input_ids"]),
            "sample": sample,
        }


def _link(folder: Path, rows: Sequence[dict[str, Any]], pool: FeaturePool) -> int:
    """Makes `folder` hold exactly one link a kept row; returns how many were made anew."""
    folder.mkdir(exist_ok=True)
    kept = [row for row in rows if row["sample"] is not None]
    expected = {f"hs_{i}.safetensors" for i in range(len(kept))}
    for path in folder.iterdir():
        if path.name not in expected:
            path.unlink()
    made = 0
    for i, row in enumerate(kept):
        source, target = pool.path(row["key"]), folder / f"hs_{i}.safetensors"
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


def _write_dataset(folder: Path, traces: Artifact, kept: Sequence[str]) -> None:
    """The `datasets` directory: int64 input_ids and loss_mask, seq_len, in the order of `kept`; torch format."""
    import datasets
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pq.read_table(traces.folder / "traces.parquet", columns=["key", "input_ids", "loss_mask"])
    table = table.filter(pc.is_in(table["key"], pa.array(kept)))
    wide = pa.list_(pa.int64())
    lengths = pc.list_value_length(table["input_ids"]).cast(pa.int64())
    columns = {
        "input_ids": table["input_ids"].cast(wide),
        "loss_mask": table["loss_mask"].cast(wide),
        "seq_len": lengths,
    }
    dataset = datasets.Dataset(pa.table(columns))
    dataset.set_format("torch")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".dataset-") as temporary:
        dataset.save_to_disk(temporary)
        for path in Path(temporary).iterdir():
            os.replace(path, folder / path.name)


def _write_index(path: Path, kept: Sequence[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "row": i,
            "trace": row["trace"],
            "split": row["split"],
            "key": row["key"],
            "tokens": row["sample"].tokens,
            "size": row["sample"].file.size,
            "checksum": row["sample"].file.checksum,
            "minimum": row["sample"].minimum,
            "maximum": row["sample"].maximum,
        }
        for i, row in enumerate(kept)
    ]
    with atomic.replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows), temporary, compression="zstd")


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    atomic.write_bytes(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
