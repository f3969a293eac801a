"""What Prefect shows of a feature store: a table with a row a shard, and where its rows come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from slipstream.artifact import Artifact
from slipstream.lineage import lineage

NONE = "n/a"  # a dash becomes the bullet of a list
COUNTS = ("samples", "tokens", "bytes", "lost")


@task(name="show-features", persist_result=False, cache_policy=NO_CACHE)
def show_features(features: Artifact, shards: Sequence[Artifact]) -> None:
    """The artifacts `features-store` (table) and `features-lineage` (markdown), also when nothing was made anew."""
    create_table_artifact(store_rows(shards), key="features-store", description=f"Feature store {features.path}")
    create_markdown_artifact(markdown(features), key="features-lineage", description="Where the features come from")


def store_rows(shards: Sequence[Artifact]) -> list[dict[str, Any]]:
    """One row a shard, and their total."""
    rows, total, damaged, files = [], dict.fromkeys(COUNTS, 0), 0, 0
    for number, shard in enumerate(shards):
        manifest, damage = shard.manifest(), shard.verify()
        for name in COUNTS:
            total[name] += manifest.counts[name]
        damaged, files = damaged + len(damage), files + len(manifest.files)
        rows.append(
            {
                "shard": str(number),
                **{name: f"{manifest.counts[name]:,}" for name in COUNTS},
                "checksums": _checksums(len(damage), len(manifest.files)),
                "tokens/s": _figure(manifest.work.get("tokens_per_s")),
                "probe": _figure(manifest.work.get("probe")),
            }
        )
    figures = {name: f"{value:,}" for name, value in total.items()}
    end = {"checksums": _checksums(damaged, files), "tokens/s": NONE, "probe": NONE}
    return [*rows, {"shard": "total", **figures, **end}]


def _checksums(damaged: int, files: int) -> str:
    """The cheap verification; `slipstream verify --deep` reads every byte."""
    return f"{damaged} of {files} files damaged" if damaged else f"{files} recorded, all files there in full"


def _figure(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, dict):
        return ", ".join(f"{name} {figure}" for name, figure in value.items())
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def markdown(features: Artifact) -> str:
    """The steps in a line, a table of their keys, contents and counts, and their folders."""
    steps = lineage(features)
    lines = [" → ".join(f"[{step.stage}](/artifacts/key/{step.stage})" for step in steps), ""]
    lines += ["| stage | made | counts | content | key |", "|---|---|---|---|---|"]
    for step in steps:
        ended = step.manifest().ended[:19].replace("T", " ")
        cells = [step.stage, ended, _counts(step), f"`{step.content[:12]}`", f"`{step.key[:12]}`"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"* {step.stage}: `{step.path}`" for step in steps)]
    run = flow_run.id and url_for("flow-run", obj_id=str(flow_run.id))
    return "\n".join([*lines, "", f"Shown by [flow run {flow_run.name}]({run})" if run else ""])


def _counts(step: Artifact) -> str:
    figures = {name: value for name, value in step.manifest().counts.items() if isinstance(value, int)}
    wanted = [name for name in ("rows", "train", "validation", "held_out", "tokens", "bytes") if name in figures]
    return ", ".join(f"{figures[name]:,} {name.replace('_', '-')}" for name in wanted)
