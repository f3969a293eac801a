"""kill -9 in the middle of every stage: the same command finishes and repeats nothing that was finished."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.process import descendants
from tests.conftest import ROOT, finish, run, start, variant

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1500)]
DEADLINE_S = 400


def rows(database: str, table: str, workdir: Path) -> int:
    """Rows recorded in a pool's ledger; 0 while it does not exist."""
    files = list(workdir.glob(database))
    if not files:
        return 0
    try:
        connection = sqlite3.connect(f"file:{files[0]}?mode=ro", uri=True)
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def traces(workdir: Path) -> int:
    """Answers recorded."""
    return rows("pool/traces/*/rows.sqlite3", "rows", workdir)


def samples(workdir: Path) -> int:
    """Hidden-state samples under their final names: complete, whether the index knows them yet or not."""
    return len(list(workdir.glob("pool/features/*/??/*.safetensors")))


def epochs(workdir: Path) -> int:
    """Epochs finished."""
    return len([p for p in workdir.glob("drafter/*/checkpoints/*") if p.name.isdigit()])


def measuring(workdir: Path) -> int:
    """1 once an acceptance server has begun."""
    return int(any(workdir.glob("acceptance/*/logs/*.log")))


def kill_when(reached: Callable[[Path], bool], config: Path, workdir: Path) -> list[int]:
    """Runs until `reached`, then kills the flow's process with -9; returns what it had started."""
    process = start(config, workdir)
    deadline = time.monotonic() + DEADLINE_S
    while not reached(workdir):
        assert process.poll() is None, f"ended before it could be killed:\n{process.stdout.read()[-4000:]}"
        assert time.monotonic() < deadline, "the stage was not reached in time"
        time.sleep(0.02)
    children = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return children


def gone(pids: list[int]) -> bool:
    """Whether none of the processes is left (zombies apart) within 30 seconds."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        command = ["ps", "-o", "pid=,stat=", *[f"-p{p}" for p in pids]]
        listing = subprocess.run(command, check=False, capture_output=True, text=True)
        if not [line for line in listing.stdout.splitlines() if " Z" not in line]:
            return True
        time.sleep(0.2)
    return False


def written(work: Path) -> dict[str, int]:
    """When each finished epoch was; what was saved inside an epoch goes when it is complete."""
    folders = [path for path in work.glob("drafter/*/checkpoints/*") if path.name.isdigit()]
    return {path.name: (path / "training_state.json").stat().st_mtime_ns for path in folders}


def test_every_stage_survives_kill_9(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes((ROOT / "deployments/prompts/smoke.jsonl").read_bytes())
    config = variant(
        "smoke",
        tmp_path / "config.yaml",
        prompts__sources=[{"path": str(prompts)}],
        traces__concurrency=2,
        features__concurrency=1,
        features__shards=1,
    )
    slow = config.read_text().replace("epochs: 1", "epochs: 3")
    config.write_text(slow)
    work = tmp_path / "work"

    children = kill_when(lambda w: traces(w) >= 4, config, work)
    assert gone(children), "a server outlived the killed flow"
    answered = traces(work)
    total = sum(
        len((folder / f"{split}.jsonl").read_text().splitlines())
        for folder in work.glob("prompts/*")
        for split in ("train", "validation")
    )
    assert 4 <= answered < total

    children = kill_when(lambda w: samples(w) >= 4, config, work)
    assert gone(children), "a server outlived the killed flow"
    captured = samples(work)
    assert 4 <= captured < total

    children = kill_when(lambda w: epochs(w) >= 1, config, work)
    assert gone(children), "the trainer outlived the killed flow"
    trained = epochs(work)
    assert 1 <= trained < 3
    before = written(work)

    children = kill_when(lambda w: measuring(w) == 1, config, work)
    assert gone(children), "a server outlived the killed flow"

    process, started = start(config, work), time.monotonic()
    done = finish(process, config, work, started)
    assert done.returncode == 0, done.output[-4000:]
    stages = done.report["stages"]
    assert stages["traces"]["work"]["reused"] == answered
    assert stages["traces"]["work"]["requested"] == total - answered
    assert traces(work) == total
    shard = next(work.glob("feature-shards/*/manifest.json")).read_text()
    assert f'"reused": {captured}' in shard
    assert f'"captured": {total - captured}' in shard
    assert stages["drafter"]["work"]["epochs_reused"] == trained
    assert stages["drafter"]["work"]["epochs_trained"] == 3 - trained
    after = written(work)
    assert {name: after[name] for name in before} == before, "a finished epoch was written again"
    assert not list(work.glob("**/*.tmp")), "a temporary file was left"

    assert run(config, work).executed() == []
