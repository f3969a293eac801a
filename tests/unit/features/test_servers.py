"""Lanes of servers: who gets which, when a fresh one starts, what is swept, how an end is told."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stub_server import StubServer

from slipstream import process, serving
from slipstream.config import RunConfig
from slipstream.errors import InputError, ServerError
from slipstream.features import extraction, servers
from slipstream.serving import Endpoint


class Started:
    """Stands for vLLM: counts starts and ends."""

    def __init__(self) -> None:
        self.lives: list[Path] = []
        self.ended = 0

    @contextmanager
    def serve(self, verifier: Any, config: Any, spec: Any, log: Path, cache: Path, gpus: Any) -> Iterator[Endpoint]:
        self.lives.append(log)
        yield Endpoint(f"http://127.0.0.1:{len(self.lives)}/v1", "m")
        self.ended += 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    made = Started()
    monkeypatch.setattr(serving, "serve", made.serve)
    return made


def test_shards_share_a_lane_and_an_error_gets_a_fresh_server(
    started: Started, make_config: Callable[..., RunConfig]
) -> None:
    config = make_config()
    with servers.shared(config.root, config):
        for _ in range(3):
            with servers.lend(config.root, config) as lease:
                assert lease.owned
                assert lease.storage.is_dir()
        assert len(started.lives) == 1
        with pytest.raises(ServerError), servers.lend(config.root, config):
            raise ServerError("died")
        with servers.lend(config.root, config) as lease:
            assert lease.storage.is_dir()
        assert len(started.lives) == 2
    assert not any((config.root / "pool/features/incoming").iterdir())


def test_as_many_lanes_as_replicas(started: Started, make_config: Callable[..., RunConfig]) -> None:
    config = make_config(servers={"device": "cpu", "gpus": 2})
    both, seen = threading.Barrier(2), []

    def shard() -> None:
        with servers.lend(config.root, config) as lease:
            seen.append(lease.storage)
            both.wait(10)  # two at a time, or this never ends

    with servers.shared(config.root, config):
        threads = [threading.Thread(target=shard) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(seen) == 4
    assert len(set(seen)) == len(started.lives) == 2


def test_named_endpoints_are_lent_together(
    stub: StubServer, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    with StubServer() as other:
        named = {"features_endpoints": [stub.url, other.url], "features_storage": str(tmp_path)}
        config = make_config(servers={"device": "cpu", **named})
        with servers.lend(config.root, config) as lease:
            assert [endpoint.url for endpoint in lease.endpoints] == [stub.url, other.url]
            assert not lease.owned
            assert lease.complaint() is None
        other.away()
        with servers.lend(config.root, config) as lease:
            assert [endpoint.model for endpoint in lease.endpoints] == ["stub", "stub"]


def test_a_storage_folder_that_is_not_here_is_refused(stub: StubServer, make_config: Callable[..., RunConfig]) -> None:
    config = make_config(
        servers={"device": "cpu", "features_endpoints": [stub.url], "features_storage": "/nowhere/here"}
    )
    with pytest.raises(InputError, match="/nowhere/here is no folder"), servers.lend(config.root, config):
        pass


def test_what_killed_runs_of_this_host_left_is_swept(tmp_path: Path) -> None:
    incoming = tmp_path / "pool" / "features" / "incoming"
    mine = extraction.process_name()
    host = mine.rpartition("-")[0]
    names = [f"{mine}-0", f"{host}-99999999-0", f"{host}-99999999-copies", "another-host-99999999-0"]
    for name in names:
        (incoming / name).mkdir(parents=True)
        (incoming / name / "cmpl-1.safetensors").touch()
    servers.sweep(tmp_path)
    assert sorted(path.name for path in incoming.iterdir()) == sorted([names[0], names[3]])


def test_the_end_of_a_process_is_told_in_a_sentence(tmp_path: Path) -> None:
    script = "import time; print('RuntimeError: out of memory', flush=True); time.sleep(60)"
    child = process.start([sys.executable, "-c", script], tmp_path / "server.log")
    endpoint = Endpoint("http://127.0.0.1:1/v1", "m", child)
    try:
        assert endpoint.ended() is None
        deadline = time.monotonic() + 20
        while not process.descendants(child.pid) or "memory" not in (tmp_path / "server.log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.descendants(child.pid)[0], signal.SIGKILL)
        while (told := endpoint.ended()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "server.log: the server ended with status 137: RuntimeError: out of memory" in told
    finally:
        child.stop()
    assert Endpoint("http://127.0.0.1:1/v1", "m").ended() is None
    assert endpoint == Endpoint("http://127.0.0.1:1/v1", "m")
