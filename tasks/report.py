"""Task: the run's report, in the work directory and as a Prefect artifact."""

from __future__ import annotations

from datetime import datetime

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from slipstream.acceptance import report
from slipstream.artifact import Artifact
from slipstream.config import RunConfig


@task(name="write-report", persist_result=False, cache_policy=NO_CACHE)
def write_report(config: RunConfig, started: datetime, stages: dict[str, Artifact], shards: list[Artifact]) -> str:
    """Writes runs/<name>/report.{json,html,md}; returns the folder."""
    folder = report.write(config, started, stages, shards)
    create_markdown_artifact((folder / "report.md").read_text(), key="report", description="Report")
    return str(folder)
