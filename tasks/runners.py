"""Who runs the mapped shards of a capture: threads of this process, or Ray (`servers.runner`).

Threads share this host's servers: a lane a replica, started once.  On Ray every shard is a Ray task that asks for the
GPUs of one server, starts it, and ends it, on whichever host has them.  What failed is tried again by the Prefect
task that runs there; what died with its process or host is tried again by Ray, the same number of times.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from prefect.task_runners import ThreadPoolTaskRunner

from slipstream.config import RunConfig
from slipstream.errors import ServerError, StageFailed
from slipstream.features import servers
from slipstream.plan import require_runner
from tasks.retries import RETRY_DELAYS_S

THREADS = 16  # lanes of servers bound the work of mapped shards, not threads
OBJECTS_BYTES = 100_000_000  # Ray's object store: tasks pass paths, digests and configuration
CONNECT_S = 10.0


def shard_runner(config: RunConfig) -> AbstractContextManager[Any]:
    """A started task runner for shards (Prefect's TaskRunner); its servers are gone when the block ends.

    Raises InputError when Ray is asked for and not installed, ServerError when its cluster does not answer.
    """
    require_runner(config)
    return _ray(config) if config.servers.runner == "ray" else _threads(config)


@contextmanager
def _threads(config: RunConfig) -> Iterator[Any]:
    threads: Any = ThreadPoolTaskRunner(max_workers=THREADS)
    with servers.shared(config.root, config), threads:
        yield threads


@contextmanager
def _ray(config: RunConfig) -> Iterator[Any]:
    """Connects to the cluster of `servers.ray_address`, or starts one here that ends with the block."""
    address = config.servers.ray_address
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # no cluster: it binds the loopback alone
    import ray
    from prefect_ray import RayTaskRunner
    from prefect_ray.context import remote_options

    own = {"address": "local", "include_dashboard": False, "object_store_memory": OBJECTS_BYTES}
    own["num_gpus"] = _gpus(config, config.servers.gpus)
    runner = RayTaskRunner(init_kwargs={"address": address} if address else own)
    options = {
        "num_gpus": _gpus(config, config.servers.tensor_parallel),
        "max_retries": len(RETRY_DELAYS_S),
        "scheduling_strategy": "SPREAD",
    }
    try:
        _require_answer(address)
        runner.__enter__()
    except OSError as error:
        raise ServerError(
            f"servers.ray_address: no Ray cluster answers at {address}; start one or correct it"
        ) from error
    try:
        with remote_options(**options):
            yield runner
    except ray.exceptions.RayError as error:
        first = str(error).strip().splitlines()[0]
        raise StageFailed(
            f"features: Ray lost a shard {1 + len(RETRY_DELAYS_S)} times ({first}); see its logs"
        ) from error
    finally:
        runner.__exit__(None, None, None)


def _require_answer(address: str | None) -> None:
    """Raises OSError when nothing listens at `host:port`: Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=CONNECT_S).close()


def _gpus(config: RunConfig, count: int) -> int:
    """`count`, or 0 where no GPU is used: on a CPU, and with servers that the user named."""
    return count if config.servers.device == "cuda" and not config.servers.features_endpoints else 0
