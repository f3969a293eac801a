"""The vLLM plugin's writer, outside vLLM: a connector's file appears whole or not at all, its lock is released."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "infra" / "serve" / "plugin"))

from slipstream_vllm import atomic_writes, tensor_parallel  # noqa: E402

TENSORS = {"hidden_states": torch.randn(3, 4, 8), "token_ids": torch.arange(3)}


class Event:
    """A copy that is complete once `synchronize` returned."""

    def __init__(self) -> None:
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True


def locked(path: Path) -> int:
    """The lock file of `path`, held exclusively, as the connector hands it to the writer."""
    fd = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def released(path: Path) -> bool:
    """Whether a reader gets the lock."""
    with Path(f"{path}.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_the_file_is_whole_when_its_name_and_its_lock_say_so(tmp_path: Path) -> None:
    path, event = tmp_path / "a.safetensors", Event()
    atomic_writes.write(TENSORS, event, str(path), locked(path))
    assert event.waited
    assert released(path)
    assert torch.equal(load_file(path)["hidden_states"], TENSORS["hidden_states"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "a.safetensors.lock"]


def test_while_it_writes_the_final_name_is_free_and_the_lock_is_held(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    seen: list[Any] = []

    def writer(tensors: dict[str, Any], event: Any, filename: str, lock_fd: int | None) -> None:
        save_file(tensors, filename)
        seen.extend([Path(filename).exists(), path.exists(), released(path), lock_fd])

    atomic_writes.through(writer, TENSORS, Event(), str(path), locked(path))
    assert seen == [True, False, False, None]


def test_a_write_that_fails_leaves_nothing_and_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"

    def full(tensors: dict[str, Any], event: Any, filename: str, lock_fd: int | None) -> None:
        Path(filename).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        atomic_writes.through(full, TENSORS, Event(), str(path), locked(path))
    assert released(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors.lock"]


@pytest.mark.parametrize("told", [False, True], ids=["as in 0.26", "as in 0.32"])
def test_one_rank_finishes_a_request_whatever_the_version(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of both versions: 0.26's connector inherits None, which vLLM takes as every rank."""

    class Base:
        def get_finished_count(self) -> int | None:
            return None

    class Connector(Base):
        pass

    if told:
        Connector.get_finished_count = lambda self: 1
    mine = Connector.get_finished_count
    package = "vllm.distributed.kv_transfer.kv_connector.v1"
    base, example = ModuleType(f"{package}.base"), ModuleType(f"{package}.example_hidden_states_connector")
    base.KVConnectorBase_V1, example.ExampleHiddenStatesConnector = Base, Connector
    parents = [".".join(package.split(".")[:i]) for i in range(1, 6)]
    for module in (*map(ModuleType, parents), base, example):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    tensor_parallel.apply()
    assert Connector().get_finished_count() == 1
    assert (Connector.get_finished_count is mine) == told
    assert Base().get_finished_count() is None
