"""Task: the verifier's answers to the training and validation prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact

from slipstream import serving
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.features import servers, while_generating
from slipstream.traces import report as page
from slipstream.traces import stage
from tasks.progress import reporting
from tasks.stage import options, show, wait_logger


@contextmanager
def _servers(config: RunConfig, logs: Path) -> Iterator[Sequence[serving.Endpoint]]:
    if config.features.capture_while_generating:
        with while_generating.answering(config.root, config, logs) as endpoints:
            yield endpoints
        return
    if config.servers.traces_endpoints:
        yield serving.connect_any(config.servers.traces_endpoints)
        return
    servers.start_ahead(config.root, config)  # new traces will want states
    specs = [serving.generation_server()] * config.servers.replicas
    cache = serving.cache_folder(config.servers, config.root)
    with serving.replicas(config.verifier, config.servers, specs, logs, cache) as endpoints:
        yield endpoints


@task(name="generate-traces", **options(stage.STAGE, lambda inputs: stage.key(inputs["config"], inputs["prompts"])))
def generate_traces(config: RunConfig, prompts: Artifact) -> Artifact:
    """Token-exact traces; only prompts that the pool does not know are asked."""
    with reporting("traces-progress", "Traces") as report, while_generating.taking(config.root, config) as states:
        artifact = stage.run(
            config.root, config, prompts, lambda logs: _servers(config, logs), report, wait_logger(), states
        )
    create_markdown_artifact(page.markdown(artifact.folder), key="traces-report", description="Traces")
    return show(artifact, "traces", "Traces")
