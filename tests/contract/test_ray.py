"""Shards of a capture on Ray: two Ray nodes with GPUs that do not exist, servers that hold no model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from tests.conftest import ROOT
from tests.contract.capturing import configuration, traces_of

# Ray's own switch for machines that are no cluster: it binds the loopback interface alone.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
GPUS = {"a": "GPU-a0,GPU-a1", "b": "GPU-b0,GPU-b1"}
ROWS = 24


@dataclass(frozen=True)
class Captured:
    """A finished capture-features: its store, its shards, what its servers saw."""

    store: Artifact
    shards: list[Artifact]
    seen: list[dict[str, str]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray cluster of two nodes of this machine, two pretended GPUs each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setenv("STUB_DELAY_S", "0.1")
        patch.setenv("STUB_SEEN", str(tmp_path_factory.mktemp("seen")))
        patch.setenv("PYTHONPATH", str(ROOT))
        from ray.cluster_utils import Cluster

        nodes = Cluster()
        size = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False, "object_store_memory": 80_000_000}
        for name, gpus in GPUS.items():
            env = {"NODE_NAME": name, "CUDA_VISIBLE_DEVICES": gpus}
            nodes.add_node(node_ip_address="127.0.0.1", env_vars=env, **size)
        yield nodes.address
        nodes.shutdown()


def seen() -> list[dict[str, str]]:
    """What every server that has started saw."""
    return [json.loads(path.read_text()) for path in sorted(Path(os.environ["STUB_SEEN"]).glob("*.json"))]


def kill_one_worker(workdir: Path) -> None:
    """kill -9 of the Ray worker of the first server, once the pool holds five samples."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if len(list(workdir.glob("pool/features/*/??/*.safetensors"))) >= 5:
            os.kill(int(seen()[0]["started_by"]), signal.SIGKILL)
            return
        time.sleep(0.02)


def capture(config: RunConfig, traces: Artifact) -> tuple[Artifact, list[Artifact]]:
    """capture-features in a process of its own."""
    path = config.root / "config.json"
    path.write_text(config.model_dump_json())
    results = {"PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(config.root / "results")}
    command = [sys.executable, str(ROOT / "tests" / "contract" / "capture_driver.py"), str(path), traces.path]
    env = {**os.environ, **results, "PREFECT_API_URL": str(PREFECT_API_URL.value())}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    store, *shards = map(Artifact.model_validate, json.loads(done.stdout.splitlines()[-1]))
    return store, shards


@pytest.fixture(scope="module")
def captured(cluster: str, prefect_server: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Captured]:
    """The same traces captured by threads, and on Ray with one worker killed."""
    made = {}
    gpus = {"device": "cuda", "gpus": 2, "tensor_parallel": 2}
    for runner, more in (("ray", {"runner": "ray", "ray_address": cluster}), ("threads", {})):
        folder = tmp_path_factory.mktemp(runner)
        config = configuration(folder, gpus | more, shards=2)
        traces = traces_of(config, ROWS)
        killer = threading.Thread(target=kill_one_worker, args=(folder,))
        if runner == "ray":
            killer.start()
        store, shards = capture(config, traces)
        if runner == "ray":
            killer.join()
        made[runner] = Captured(store, shards, seen())
    return made


def test_shards_run_on_both_nodes_on_the_gpus_that_ray_gave_them(captured: dict[str, Captured]) -> None:
    servers = captured["ray"].seen
    assert {server["NODE_NAME"] for server in servers} == {"a", "b"}
    for server in servers:
        assert sorted(server["CUDA_VISIBLE_DEVICES"].split(",")) == GPUS[server["NODE_NAME"]].split(",")


def test_the_store_is_the_one_that_threads_make(captured: dict[str, Captured]) -> None:
    ray, threads = captured["ray"], captured["threads"]
    assert (ray.store.key, ray.store.content) == (threads.store.key, threads.store.content)
    assert ray.store.manifest().counts == threads.store.manifest().counts
    states = [
        {name: record for name, record in made.store.manifest().files.items() if name.startswith("hidden_states")}
        for made in (ray, threads)
    ]
    assert len(states[0]) == ROWS
    assert states[0] == states[1]
    assert ray.store.verify(deep=True) == []


def test_the_shard_of_a_killed_worker_is_finished_by_another(captured: dict[str, Captured]) -> None:
    servers = captured["ray"].seen
    assert len(servers) == 3  # one a shard, and one more for the shard whose worker was killed
    assert len({server["started_by"] for server in servers}) == 3
    work = [shard.manifest().work for shard in captured["ray"].shards]
    again = [figures for figures in work if figures["reused"]]
    assert len(again) == 1, work
    assert again[0]["captured"] + again[0]["reused"] == ROWS // 2
