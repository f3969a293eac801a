"""Tasks: hidden states captured shard by shard, then assembled into one store."""

from __future__ import annotations

from contextlib import AbstractContextManager

from prefect import task

from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.features import servers, shard_stage, store
from slipstream.features.shards import Shard
from tasks.progress import reporting
from tasks.stage import options, show, wait_logger


def shared_servers(config: RunConfig) -> AbstractContextManager[None]:
    """Inside the block the shards share extraction servers; none starts while nothing is missing."""
    return servers.shared(config.root, config)


@task(
    name="capture-shard",
    task_run_name="capture-shard-{shard.index}",
    **options(shard_stage.STAGE, lambda i: shard_stage.shard_key(i["config"], i["traces"], i["shard"])),
)
def capture_shard(config: RunConfig, traces: Artifact, shard: Shard) -> Artifact:
    """The hidden states of one row range, in the pool."""
    with reporting(f"features-shard-{shard.index}-progress", f"Features, shard {shard.index}") as report:
        return shard_stage.capture_shard(
            config.root, config, traces, shard, lambda: servers.lend(config.root, config), report
        )


@task(name="assemble-features", **options(store.STAGE, lambda i: store.key(i["config"], i["traces"])))
def assemble_features(config: RunConfig, traces: Artifact, shards: list[Artifact]) -> Artifact:
    """The store that speculators trains on."""
    artifact = store.assemble(config.root, config, traces, shards, wait_logger())
    return show(artifact, "features", "Feature store")
