"""Hidden states of finished traces: planned, captured shard by shard, assembled into one store."""

from __future__ import annotations

from prefect import flow, unmapped
from prefect.runtime import flow_run

from slipstream.artifact import Artifact
from slipstream.config import FeaturesConfig, RunConfig
from tasks.features import assemble_features, capture_shard, find_traces, layer_reference, plan_features
from tasks.features_shown import show_features
from tasks.runners import shard_runner


def _run_name() -> str:
    config = flow_run.parameters["config"]
    return f"{config['name'] if isinstance(config, dict) else config.name}-features"


@flow(
    name="capture-features",
    flow_run_name=_run_name,
    persist_result=False,  # a completed run with a stored result could not be run again
)
def capture_features(
    config: RunConfig, traces: str, features: FeaturesConfig | None = None
) -> tuple[Artifact, list[Artifact]]:
    """Capture the hidden states of traces through vLLM into a store that speculators trains on.

    Part of train-drafter, and a flow of its own.  Refuses what cannot fit on the disk before a server starts;
    states that the row pool has are not captured again.

    Args:
        config: Everything a run needs; this flow reads verifier, servers, features and rates.
        traces: Folder of a finished traces artifact.
        features: Replaces the configuration's `features`.

    Returns:
        The store and its shards.
    """
    config = config.with_features(features) if features else config
    if config.servers.runner == "ray":
        config = config.anchored()
    source = find_traces(config, traces)
    planned = plan_features(config, source)
    shards, layers = [part.shard for part in planned.shards], layer_reference(config)
    with shard_runner(config) as runner:
        arguments = {
            "config": unmapped(config),
            "traces": unmapped(source),
            "shard": shards,
            "layers": unmapped(layers),
        }
        captured = runner.map(capture_shard, arguments).result() if shards else []
    store = assemble_features(config, source, captured)
    show_features(store, captured)
    return store, captured
