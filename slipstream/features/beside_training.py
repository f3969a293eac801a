"""Extraction servers that run beside a training without a store, on the GPUs that it leaves free."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream import serving
from slipstream.config import RunConfig
from slipstream.errors import InputError
from slipstream.features import servers
from slipstream.features.lease import Lease


def count(config: RunConfig) -> int:
    """How many servers there will be; raises InputError when `drafter.devices` leaves too few GPUs for one."""
    wanted, devices = config.servers, config.drafter.devices
    if wanted.features_endpoints:
        return len(wanted.features_endpoints)
    if wanted.device == "cpu":
        return wanted.replicas
    free = serving.free_gpus(wanted, devices)
    if len(free) < wanted.tensor_parallel:
        raise InputError(
            f"features.store none: training on drafter.devices {devices} leaves {len(free)} of servers.gpus "
            f"{wanted.gpus} for the extraction server, which needs {wanted.tensor_parallel} "
            "(servers.tensor_parallel); train on fewer GPUs, name servers.features_endpoints, or keep a store"
        )
    return len(free) // wanted.tensor_parallel


@contextmanager
def serving_states(workdir: Path, config: RunConfig) -> Iterator[list[Lease]]:
    """The servers, ready; those that were started here are gone with what they wrote when the block ends."""
    wanted = config.servers
    if wanted.features_endpoints:
        with servers.lend(workdir, config) as lease:
            yield [lease]
        return
    servers.sweep(workdir)
    storages = [servers.storage_folder(workdir, lane) for lane in range(count(config))]
    specs = [servers.spec(config, storage) for storage in storages]
    cache = serving.cache_folder(wanted, workdir)
    try:
        for storage in storages:
            storage.mkdir(parents=True, exist_ok=True)
        with serving.replicas(
            config.verifier, wanted, specs, workdir / "logs", cache, config.drafter.devices
        ) as endpoints:
            yield [
                Lease(endpoint, storage, endpoint.ended, owned=True)
                for endpoint, storage in zip(endpoints, storages, strict=True)
            ]
    finally:
        for storage in storages:
            shutil.rmtree(storage, ignore_errors=True)
