"""Epoch folders: whole or not there; the figure that names the best one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.drafter import checkpoints

KILLED = """
import os, signal, sys
from pathlib import Path
from slipstream.drafter import checkpoints

checkpoints.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
checkpoints.publish(Path(sys.argv[1]), "1")
"""


def write(folder: Path, name: str, text: str = "x") -> Path:
    """A checkpoint folder with one file."""
    (folder / name).mkdir(parents=True)
    (folder / name / "model.safetensors").write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("accuracies", "length"),
    [([0.8, 0.5], 1 + 0.8 + 0.4), ([1.0, 1.0, 1.0], 4.0), ([0.0, 1.0], 1.0), ([], 1.0), ([0.9, 0.8, 0.5], 2.98)],
)
def test_expected_accepted_length(accuracies: list[float], length: float) -> None:
    metrics = {f"cond_acc_{step}_epoch": accuracy for step, accuracy in enumerate(accuracies)} | {"loss_epoch": 3.0}
    assert checkpoints.expected_accepted_length(metrics) == pytest.approx(length)


def test_only_whole_folders_are_epochs(tmp_path: Path) -> None:
    for name in ("0", "2", "10", ".3.tmp", "initial", "interrupted"):
        write(tmp_path, name)
    (tmp_path / "4").write_text("a file")
    (tmp_path / "best").symlink_to("2")
    assert checkpoints.finished_epochs(tmp_path) == [0, 2, 10]
    assert checkpoints.finished_epochs(tmp_path / "nowhere") == []


def test_publishing_gives_the_final_name(tmp_path: Path) -> None:
    write(tmp_path, checkpoints.temporary_name("1"))
    assert checkpoints.finished_epochs(tmp_path) == []
    assert checkpoints.publish(tmp_path, "1") == tmp_path / "1"
    assert checkpoints.finished_epochs(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_publishing_replaces_an_older_folder(tmp_path: Path) -> None:
    write(tmp_path, "1", "old")
    (tmp_path / "1" / "extra").touch()
    write(tmp_path, checkpoints.temporary_name("1"), "new")
    checkpoints.publish(tmp_path, "1")
    assert [(p.name, p.read_text()) for p in (tmp_path / "1").iterdir()] == [("model.safetensors", "new")]


def test_a_kill_before_the_rename_leaves_no_epoch(tmp_path: Path) -> None:
    write(tmp_path, checkpoints.temporary_name("1"))
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert checkpoints.finished_epochs(tmp_path) == []
    checkpoints.sweep(tmp_path)
    assert os.listdir(tmp_path) == []


def test_sweep_keeps_what_is_finished(tmp_path: Path) -> None:
    for name in ("0", "initial", ".1.tmp"):
        write(tmp_path, name)
    checkpoints.sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["0", "initial"]


def test_validation_metrics(tmp_path: Path) -> None:
    write(tmp_path, "3")
    (tmp_path / "3" / "val_metrics.json").write_text(json.dumps({"loss_epoch": 1.5}))
    assert checkpoints.validation_metrics(tmp_path, 3) == {"loss_epoch": 1.5}
