"""A tiny training to be interrupted: its store, its vocabulary, its job, and the process that trains."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream import vocabulary
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.drafter import metrics_file, stage
from tests.conftest import ROOT
from tests.unit.conftest import SMALL  # it makes the stub server importable by the name that fixtures use
from tests.unit.features.test_store import HIDDEN, Runner, StubServer

DRAFTER = {
    "compute_dtype": "float32",
    "sequence_length": 16,
    "num_workers": 0,
    "threads": 1,
    "log_every": 1,
    "learning_rate": 1e-3,
}


class Driver:
    """Trainings in processes forked from one that has imported everything (`training_driver`)."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def train(
        self,
        job: Path,
        world: int = 1,
        at: tuple[int, str] | None = None,
        number: int = signal.SIGKILL,
        ranks: Sequence[int] = (0, 1),
    ) -> list[int]:
        """Trains until the end, or until these ranks get a signal at a step and place; the exit status of each rank."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        kill = {"step": at[0], "where": at[1], "number": number} if at else None
        order = {"job": str(job), "world": world, "kill": kill, "killed": list(ranks)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        statuses: list[int] = json.loads(self._process.stdout.readline())
        return statuses


@contextmanager
def runner(root: Path) -> Iterator[Runner]:
    """Traces and stores in this work directory, from a stub with states as wide as the pocket verifier's."""

    def config(**changes: Any) -> RunConfig:
        values = copy.deepcopy(SMALL) | {"workdir": str(root)}
        return RunConfig.model_validate(values | {name: values.get(name, {}) | some for name, some in changes.items()})

    with StubServer(hidden=HIDDEN) as stub:
        yield Runner(root, stub, config)


@contextmanager
def driver() -> Iterator[Driver]:
    """A driver that is ready."""
    command = [sys.executable, "-m", "tests.training_driver"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield Driver(process)
        finally:
            assert process.stdin is not None
            process.stdin.write("\n")  # closing it is not enough: a process that a test forked may have it open
            process.stdin.flush()


def inputs(run: Runner, rows: list[dict[str, Any]]) -> tuple[Artifact, Artifact]:
    """Features and vocabulary of these rows."""
    return run(rows), vocabulary.run(run.root, run.make(drafter=DRAFTER), run.traces(rows))


def job(run: Runner, made: tuple[Artifact, Artifact], name: str, **drafter: Any) -> Path:
    """The job file of a training in a folder of its own."""
    folder = run.root / name
    folder.mkdir()
    config = run.make(drafter=DRAFTER | drafter)
    path = folder / "job.json"
    path.write_text(stage._job(folder, config, *made, None).model_dump_json())
    return path


def steps(path: Path) -> list[tuple[int, int, Any, float]]:
    """(epoch, step, learning rate, loss) of a job's lines of training steps, in the file's order."""
    rows = metrics_file.read(path.parent / metrics_file.FILE)
    return [(row["epoch"], row["global_step"], row["lr"], row["train"]["loss"]) for row in rows if "train" in row]


def validations(path: Path) -> list[tuple[int, float]]:
    """(epoch, loss) of a job's lines of validation."""
    rows = metrics_file.read(path.parent / metrics_file.FILE)
    return [(row["epoch"], row["val"]["loss_epoch"]) for row in rows if "val" in row]
