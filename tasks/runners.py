"""Who runs the mapped shards of a capture: threads of this process, or Ray (`servers.runner`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.task_runners import ThreadPoolTaskRunner

from slipstream.config import RunConfig
from slipstream.features import servers

THREADS = 16  # lanes of servers bound the work of mapped shards, not threads


@contextmanager
def shard_runner(config: RunConfig) -> Iterator[Any]:
    """A started task runner for shards (Prefect's TaskRunner); its servers are gone when the block ends."""
    threads: Any = ThreadPoolTaskRunner(max_workers=THREADS)
    with servers.shared(config.root, config), threads:
        yield threads
