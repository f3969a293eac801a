"""The options that every stage task has, and the table that shows what a stage made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger

from slipstream.artifact import Artifact
from tasks.caching import StageKey
from tasks.retries import RETRY_DELAYS_S, is_transient


def options(stage: str, key_of: Callable[[Mapping[str, Any]], str]) -> dict[str, Any]:
    """Keyword arguments for `@task`: cached across runs under the stage's key, JSON results, bounded retries."""
    return {
        "cache_policy": StageKey(stage=stage, key_of=key_of),
        "persist_result": True,
        "result_serializer": "json",
        "retries": len(RETRY_DELAYS_S),
        "retry_delay_seconds": RETRY_DELAYS_S,
        "retry_condition_fn": is_transient,
        "tags": ["slipstream"],
    }


def wait_logger() -> Callable[[str], None]:
    """Logs that another run holds the folder."""
    return get_run_logger().info


def show(artifact: Artifact, key: str, title: str) -> Artifact:
    """Puts the artifact's counts into the UI as a table; returns the artifact."""
    manifest = artifact.manifest()
    rows = [{"what": name, "value": _plain(value)} for name, value in {**manifest.counts, **manifest.work}.items()]
    rows += [{"what": "seconds", "value": manifest.seconds}, {"what": "folder", "value": artifact.path}]
    create_table_artifact(rows, key=key, description=title)
    return artifact


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else str(value)
