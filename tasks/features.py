"""Tasks: hidden states planned, captured shard by shard, then assembled into one store."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.features import reference, servers, shard_stage, store
from slipstream.features.plan import CapturePlan, Load, plan_capture
from slipstream.features.shards import Shard
from slipstream.traces.origin import open_traces
from tasks.progress import duration, reporting, size
from tasks.stage import options, show, wait_logger


@task(name="find-traces", persist_result=False, cache_policy=NO_CACHE)
def find_traces(config: RunConfig, folder: str) -> Artifact:
    """The traces in `folder`, if they are this verifier's."""
    return open_traces(config, Path(folder))


@task(name="plan-features", persist_result=False, cache_policy=NO_CACHE)
def plan_features(config: RunConfig, traces: Artifact) -> CapturePlan:
    """What is to be captured, as a table; fails when it does not fit."""
    planned = plan_capture(config.root, config, traces)
    rows = [_planned(str(part.shard.index), part.whole, part.missing, planned) for part in planned.shards]
    rows.append(_planned("total", planned.whole, planned.missing, planned))
    create_table_artifact(rows, key="features-plan", description=_summary(planned))
    planned.require_space(config.root / "pool")
    return planned


def _planned(name: str, whole: Load, missing: Load, planned: CapturePlan) -> dict[str, str]:
    return {
        "shard": name,
        "rows": f"{whole.rows:,}",
        "tokens": f"{whole.tokens:,}",
        "rows to capture": f"{missing.rows:,}",
        "tokens to capture": f"{missing.tokens:,}",
        "bytes to capture": size(missing.tokens * planned.bytes_per_token),
        "expected time": duration(missing.tokens / planned.tokens_per_s) if missing.tokens else "none",
    }


def _summary(planned: CapturePlan) -> str:
    if not planned.bytes_per_token:
        return "Plan of the capture: no store, so nothing is captured; the trainer asks a server as it goes."
    gpus = f" with {planned.gpus_each} GPUs each" if planned.gpus_each else ""
    return (
        f"Plan of the capture: {planned.servers} server(s){gpus} at {planned.tokens_per_s:,.0f} tokens/s together, "
        f"{planned.bytes_per_token:,} bytes a token. Disk: {planned.needed / 1e9:,.2f} GB needed with the reserve, "
        f"{planned.free / 1e9:,.2f} GB free."
    )


@task(name="capture-reference", **options(reference.STAGE, lambda i: reference.key(i["config"])))
def capture_reference(config: RunConfig) -> Artifact:
    """A few short sequences at every layer: what the shards' layers are compared with."""
    artifact = reference.run(config.root, config, lambda: reference.serve(config.root, config), wait_logger())
    return show(artifact, "feature-reference", "Layer reference")


def begin_reference(config: RunConfig) -> None:
    """Begins the layer reference beside what comes next, on a host with room for several servers."""
    if reference.wanted(config) and config.servers.start_ahead:
        capture_reference.submit(config)


def layer_reference(config: RunConfig) -> Artifact | None:
    """The layer reference, captured now unless it is there or begun; None when none is wanted."""
    return capture_reference(config) if reference.wanted(config) else None


@task(
    name="capture-shard",
    task_run_name="capture-shard-{shard.index}",
    **options(shard_stage.STAGE, lambda i: shard_stage.shard_key(i["config"], i["traces"], i["shard"])),
)
def capture_shard(config: RunConfig, traces: Artifact, shard: Shard, layers: Artifact | None = None) -> Artifact:
    """The hidden states of one row range, in the pool; some of them probed, `layers` being the layer reference."""
    with (
        reporting(f"features-shard-{shard.index}-progress", f"Features, shard {shard.index}") as report,
        servers.lending(config.root, config) as lend,
    ):
        return shard_stage.capture_shard(config.root, config, traces, shard, lend, report, layers)


@task(name="assemble-features", **options(store.STAGE, lambda i: store.key(i["config"], i["traces"])))
def assemble_features(config: RunConfig, traces: Artifact, shards: list[Artifact]) -> Artifact:
    """The store that speculators trains on."""
    artifact = store.assemble(config.root, config, traces, shards, wait_logger())
    return show(artifact, "features", "Feature store")
