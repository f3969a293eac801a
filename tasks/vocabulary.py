"""Task: the draft vocabulary, and what it covers."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact

from slipstream import vocabulary
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.vocabulary import report
from tasks.stage import options, show, wait_logger


@task(name="choose-vocabulary", **options(vocabulary.STAGE, lambda i: vocabulary.key(i["config"], i["traces"])))
def choose_vocabulary(config: RunConfig, traces: Artifact) -> Artifact:
    """The maps between draft and target ids."""
    artifact = vocabulary.run(config.root, config, traces, wait_logger())
    page = report.markdown(artifact.folder)
    create_markdown_artifact(page, key="vocabulary-coverage", description="Coverage of the draft vocabulary")
    return show(artifact, "vocabulary", "Draft vocabulary")
