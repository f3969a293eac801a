"""Task: acceptance and speed on vLLM servers."""

from __future__ import annotations

from prefect import task

from slipstream.acceptance import stage
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from tasks.progress import reporting
from tasks.stage import options, show, wait_logger


@task(
    name="measure-acceptance",
    **options(stage.STAGE, lambda i: stage.key(i["config"], i["prompts"], i["drafter"])),
)
def measure_acceptance(config: RunConfig, prompts: Artifact, drafter: Artifact) -> Artifact:
    """Rates, lengths and speed with the drafter and without it, on held-out prompts."""
    with reporting("acceptance-progress", "Acceptance") as report:
        artifact = stage.run(config.root, config, prompts, drafter, report, wait_logger())
    return show(artifact, "acceptance", "Acceptance")
