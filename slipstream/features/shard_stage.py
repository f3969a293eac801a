"""The features stage, first half: one row range is captured into the row pool.

    feature-shards/<key>/
      index.parquet   one row a sample (columns: `index`)
      lost.jsonl      samples that could not be captured, with the reason
      probe.json      what captured samples were compared with (`probe`); absent while all came from other shards

Its manifest lists the samples' files where they lie, in the pool.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from slipstream import atomic
from slipstream.artifact import Artifact, FileRecord, claim, stage_key
from slipstream.config import RunConfig
from slipstream.digest import digest
from slipstream.errors import StageFailed
from slipstream.features import capture, disk, index, probe, servers, vouched
from slipstream.features.index import Entry
from slipstream.features.lease import Lend
from slipstream.features.recipe import PRE_NORM, final_state, open_pool, recipe
from slipstream.features.rows import Row, read_rows
from slipstream.features.shards import Shard
from slipstream.progress import Report

STAGE, VERSION = "feature-shards", 2
LOST = "lost.jsonl"


def _inputs(rows: Sequence[Row]) -> dict[str, str]:
    return {"rows": digest([row.key for row in rows])}


def shard_key(config: RunConfig, traces: Artifact, shard: Shard) -> str:
    """The folder key of a shard: it follows the token sequences, not their row numbers."""
    rows = list(read_rows(config, traces, shard.start, shard.stop))
    return stage_key(STAGE, VERSION, recipe(config), _inputs(rows))


def capture_shard(
    workdir: Path,
    config: RunConfig,
    traces: Artifact,
    shard: Shard,
    lend: Lend,
    report: Report,
    layers: Artifact | None = None,
) -> Artifact:
    """Captures the shard's samples that the pool lacks, and probes what no probe has vouched for.

    `lend` is entered only when there are any; `layers` is the layer reference.  Raises StageFailed when a larger share
    than `features.max_lost_share` could not be captured, or the probe found something wrong.
    """
    rows = list(read_rows(config, traces, shard.start, shard.stop))
    inputs, made = _inputs(rows), recipe(config)
    name = stage_key(STAGE, VERSION, made, inputs)
    with disk.explained(workdir), claim(workdir, STAGE, name) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        servers.sweep(workdir)
        with closing(open_pool(workdir, config)) as pool:
            missing = {row.key: row for row in rows if pool.find(row.token_ids) is None}
            outcome, probed = capture.Outcome(), None
            if missing and made["final_state"] != PRE_NORM:
                raise _cannot_be_captured(len(missing), len(rows), shard, made["final_state"], traces)
            if missing:
                vouched.forget(pool.folder, missing)
                wanted = [(row.number, row.token_ids) for row in missing.values()]
                outcome = capture.capture(wanted, lend, pool, config.features, report)
            found = [(row, pool.find(row.token_ids)) for row in rows]
            held = [row for row, sample in found if sample]  # a lost row's damaged file may still be there
            if config.features.probe_samples and vouched.unprobed(pool.folder, [row.key for row in held]):
                with lend() as lease:
                    probed = probe.probe(config, pool, held, lease, layers, folder.path, final_state(config), missing)
            reasons = {key: outcome.lost.get(row.number, "not in the pool") for key, row in missing.items()}
            entries = [Entry(row.number, row.trace, row.split, row.key, sample) for row, sample in found if sample]
            lost = [
                {"row": row.number, "trace": row.trace, "key": row.key, "reason": reasons.get(row.key, "damaged since")}
                for row, sample in found
                if sample is None
            ]
            samples = {entry.key: entry.sample for entry in entries}
            pool.sync(list(samples))  # first: the fsync of a small file would wait for all of these, unseen
            atomic.write_lines(folder.path / LOST, lost)
            if len(lost) > config.features.max_lost_share * len(rows):
                raise StageFailed(
                    f"features: {len(lost)} of {len(rows)} samples of shard {shard.index} could not be captured, more "
                    f"than max_lost_share {config.features.max_lost_share:g}; the first: {lost[0]['reason']}"
                )
            index.write(folder.path / index.FILE, entries, pool.form.dtype)
            files: dict[str, FileRecord | None] = {LOST: None, index.FILE: None}
            if (folder.path / probe.FILE).exists():
                files[probe.FILE] = None
            files |= {os.path.relpath(pool.path(key), folder.path): info.file for key, info in samples.items()}
        return folder.commit(
            version=VERSION,
            recipe=made,
            inputs=inputs,
            content=digest(sorted(samples)),
            files=files,
            counts={
                "samples": len(samples),
                "tokens": sum(info.tokens for info in samples.values()),
                "bytes": sum(info.file.size for info in samples.values()),
                "lost": len(lost),
            },
            work={
                "captured": outcome.captured,
                "reused": len(samples) - outcome.captured,
                "captured_tokens": outcome.tokens,
                "tokens_per_s": outcome.tokens_per_s,
                "vllm": outcome.vllm,
                "restarts": outcome.restarts,
                "suspects": len(outcome.suspects),
                "paused_s": outcome.paused_s,
                "probe": None if probed is None else probed.summary(),
            },
        )


def _cannot_be_captured(missing: int, rows: int, shard: Shard, final_state: str, traces: Artifact) -> StageFailed:
    return StageFailed(
        f"features: {missing} of {rows} samples of shard {shard.index} are gone or damaged, and a server gives the "
        f"final state {PRE_NORM}, this store holds it {final_state}: import the store "
        f"{traces.manifest().origin.get('store')} again"
    )
