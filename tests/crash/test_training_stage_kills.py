"""The drafter stage whose real training process gets SIGTERM, then kill -9; and one of two ranks under torchrun."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipstream import process
from slipstream.drafter import checkpoints, selection, stage
from slipstream.drafter.follower import Watch
from slipstream.drafter.job import Job
from slipstream.drafter.retention import Retention
from slipstream.errors import TransientError
from slipstream.progress import silent
from tests import training
from tests.unit.features.test_store import rows_of

DEADLINE_S = 240


def workers() -> list[int]:
    """Training processes below this one: the ranks, not their supervisor, torchrun or data workers."""
    found = []
    for pid in process.descendants(os.getpid()):
        try:
            words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"slipstream.drafter.worker" in words and not {b"slipstream.process", b"torch.distributed.run"} & set(words):
            found.append(pid)
    return sorted(found)


def after(steps: int, metrics: Callable[[], Path | None], number: int, work: Callable[[], Any]) -> Any:
    """Does the work; the last rank gets the signal once so many steps are in the metrics file."""
    with ThreadPoolExecutor(1) as aside:
        done, deadline = aside.submit(work), time.monotonic() + DEADLINE_S
        while not (path := metrics()) or path.read_bytes().count(b'"global_step"') < steps or not workers():
            assert not done.done(), f"ended before step {steps}: {done.exception()}"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(workers()[-1], number)
        return done.result()


def test_the_stage_continues_after_sigterm_and_kill_9_and_keeps_what_is_needed(tmp_path: Path) -> None:
    with training.runner(tmp_path) as run:
        made = training.inputs(run, rows_of(48))
        config = run.make(drafter=training.DRAFTER | {"epochs": 4, "scheduler": "linear", "warmup_ratio": 0.0})

    def metrics() -> Path | None:
        return next(tmp_path.glob("drafter/*/metrics.jsonl"), None)

    def attempt() -> Any:
        return stage.run(tmp_path, config, *made, silent)

    with pytest.raises(TransientError, match="saved its position"):
        after(3, metrics, signal.SIGTERM, attempt)
    assert next(path.name for path in tmp_path.glob("drafter/*/checkpoints/[0-9]*")).startswith("0-step-")
    with pytest.raises(TransientError, match="was killed"):
        after(15, metrics, signal.SIGKILL, attempt)
    assert workers() == []
    artifact = attempt()
    store = artifact.folder / stage.CHECKPOINTS
    lines = training.steps(artifact.folder / "job.json")
    total = len(lines)
    assert [step for _, step, _, _ in lines] == list(range(total))
    assert [epoch for epoch, _ in training.validations(artifact.folder / "job.json")] == [0, 1, 2, 3]
    peak = training.DRAFTER["learning_rate"]
    assert [rate for _, _, rate, _ in lines] == pytest.approx([peak * (total - step) / total for step in range(total)])
    lengths = selection.lengths(store)
    assert sorted(lengths) == [0, 1, 2, 3]
    best = max(lengths, key=lambda epoch: lengths[epoch])
    assert {int(path.parent.name) for path in store.glob("*/model.safetensors")} == {best, 3}
    assert len(list(artifact.folder.glob("epochs/*/flat/model.safetensors"))) == 4
    assert artifact.verify(deep=True) == []
    assert attempt() == artifact
    os.truncate(store / "3" / "optimizer.state", 0)  # as quarantine leaves it
    again = attempt()
    assert (again.content, again.manifest().work["epochs_trained"]) == (artifact.content, 0)
    shutil.rmtree(store / "1")
    again = attempt()
    assert again.content == artifact.content
    assert again.manifest().work["epochs_trained"] > 0
    assert training.steps(again.folder / "job.json") == lines
    assert again.verify(deep=True) == []


def test_a_killed_rank_under_torchrun_is_no_fault_of_the_training(tmp_path: Path) -> None:
    """Two processes on a CPU; the stage starts so many for as many GPUs."""
    with training.runner(tmp_path) as run:
        made = training.inputs(run, rows_of(48))
        path = training.job(run, made, "two", epochs=4, checkpoint_steps=1)
        config = run.make(drafter={"devices": [0, 1], "epochs": 4})
    folder = path.parent

    def attempt() -> None:
        retention = Retention(folder / stage.CHECKPOINTS, True, lambda name: None)
        stage._train(folder, Job.load(path), config, Watch(folder, silent, None), [], retention)

    with pytest.raises(TransientError, match="was killed"):
        after(3, lambda: next(folder.glob("metrics.jsonl"), None), signal.SIGKILL, attempt)
    newest = checkpoints.newest(folder / stage.CHECKPOINTS)
    assert newest is not None
    state = checkpoints.state(newest)
    assert 2 <= state["global_step"] < sum(state["steps"])
    assert workers() == []
