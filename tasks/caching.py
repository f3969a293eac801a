"""The cache policy of every stage: its folder's key, and a hit only while the folder verifies.

Prefect's own policies do not fit: INPUTS holds no task name, and a hit looks at the result record alone.
Here a record whose artifact is lost or damaged is overwritten with an expired one, which makes it a miss, and
the stage makes again only what is damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.results import get_result_store
from prefect.types import DateTime

from slipstream.artifact import Artifact
from slipstream.errors import SlipstreamError

PAST = DateTime(2000, 1, 1, tzinfo=UTC)


@dataclass
class StageKey(CachePolicy):
    """`key_of(inputs)` is the stage folder's key for the task's arguments."""

    stage: str = ""
    key_of: Callable[[Mapping[str, Any]], str] = lambda inputs: ""

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str | None:
        """The key; an input that is wrong gives none, and the task then says what is wrong with it."""
        try:
            key = f"{self.stage}-{self.key_of(inputs)}"
        except SlipstreamError:
            return None
        expire_unless_intact(key)
        return key


def expire_unless_intact(key: str) -> None:
    """Turns the stored record of `key` into a miss when it cannot be read or its artifact does not verify."""
    store = get_result_store()
    if not store.exists(key):
        return
    try:
        artifact = store.read(key).result
        damage = artifact.verify() if isinstance(artifact, Artifact) else ["not an artifact"]
    except Exception as error:  # a cut or foreign record is a plain miss
        damage = [str(error)]
    if damage:
        get_run_logger().warning("%s: finished before but no longer intact (%s); making it again", key, damage[0])
        store.write(obj=None, key=key, expiration=PAST)
