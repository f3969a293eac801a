"""Who runs shards: what is refused before anything starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from slipstream.config import RunConfig
from slipstream.errors import ServerError
from slipstream.serving import free_port
from tasks.runners import shard_runner


def test_a_ray_cluster_that_is_not_there_is_named_at_once(make_config: Callable[..., RunConfig]) -> None:
    address = f"127.0.0.1:{free_port()}"
    started = time.monotonic()
    config = make_config(servers={"runner": "ray", "ray_address": address})
    with (
        pytest.raises(ServerError, match=f"servers.ray_address: no Ray cluster answers at {address}"),
        shard_runner(config),
    ):
        raise AssertionError("entered")
    assert time.monotonic() - started < 60
