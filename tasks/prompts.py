"""Task: prompts read, checked and split."""

from __future__ import annotations

from prefect import task

from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.traces import prompt_set
from tasks.stage import options, show, wait_logger


@task(name="split-prompts", **options(prompt_set.STAGE, lambda inputs: prompt_set.key(inputs["config"].prompts)))
def split_prompts(config: RunConfig) -> Artifact:
    """Train, validation and held-out prompts as one artifact."""
    artifact = prompt_set.run(config.root, config.prompts, wait_logger())
    return show(artifact, "prompts", "Prompts by split")
