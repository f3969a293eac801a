"""Epoch folders: whole or not there; the figure that names the best one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.drafter import checkpoints, selection
from slipstream.drafter.checkpoints import Position

KILLED = """
import os, signal, sys
from pathlib import Path
from slipstream.drafter import checkpoints

checkpoints.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
checkpoints.publish(Path(sys.argv[1]), "1")
"""


def write(folder: Path, name: str, text: str = "x") -> Path:
    """A checkpoint folder with one file and its record."""
    (folder / name).mkdir(parents=True)
    (folder / name / "model.safetensors").write_text(text)
    checkpoints.seal(folder / name, {})
    return folder / name


def test_only_whole_folders_are_epochs(tmp_path: Path) -> None:
    for name in ("0", "2", "10", ".3.tmp", "initial", "interrupted", "11-step-4"):
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
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == ["model.safetensors", "record.json"]
    assert (tmp_path / "1" / "model.safetensors").read_text() == "new"


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


@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("0", Position(1)),
        ("12", Position(13)),
        ("3-step-150", Position(3, 150)),
        ("initial", None),
        ("3-step-150.damaged", None),
        (".3.tmp", None),
        ("best", None),
    ],
)
def test_a_name_says_what_is_done(name: str, position: Position | None) -> None:
    assert Position.of(name) == position
    if position is not None:
        assert position.name == name


def test_training_continues_from_the_checkpoint_with_the_most_steps(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None
    for name in ("initial", "0", "1-step-30"):
        write(tmp_path, name)
    assert checkpoints.newest(tmp_path) == tmp_path / "1-step-30"
    write(tmp_path, "1-step-200")
    assert checkpoints.newest(tmp_path) == tmp_path / "1-step-200"
    write(tmp_path, "1")
    assert checkpoints.newest(tmp_path) == tmp_path / "1"


@pytest.mark.parametrize("fault", ["cut", "gone", "changed", "no record", "half record"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that lost its power may keep a rename and lose the bytes before it."""
    write(tmp_path, "0")
    damaged = write(tmp_path, "1", "weights")
    file = damaged / ("record.json" if "record" in fault else "model.safetensors")
    if fault in ("gone", "no record"):
        file.unlink()
    elif fault == "changed":
        file.write_text("w3ights")
    else:
        file.write_bytes(file.read_bytes()[:3])
    assert checkpoints.newest(tmp_path) == tmp_path / "0"
    assert str(file) in caplog.text
    assert checkpoints.finished_epochs(tmp_path) == [0]
    assert (tmp_path / "1.damaged").is_dir()
    write(tmp_path, checkpoints.temporary_name("1"))
    checkpoints.publish(tmp_path, "1")
    checkpoints.settle(tmp_path, Position(2))
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_a_cut_file_makes_an_epoch_unfinished_before_anybody_resumes(tmp_path: Path) -> None:
    write(tmp_path, "0")
    os.truncate(write(tmp_path, "1") / "model.safetensors", 0)
    assert checkpoints.finished_epochs(tmp_path) == [0]


def test_a_later_checkpoint_drops_those_inside_epochs_before_it(tmp_path: Path) -> None:
    for name in ("0", "1-step-10", "1-step-20", "initial"):
        write(tmp_path, name)
    checkpoints.settle(tmp_path, Position(1, 20))
    assert sorted(os.listdir(tmp_path)) == ["0", "1-step-20", "initial"]
    write(tmp_path, "1")
    checkpoints.settle(tmp_path, Position(2))
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "initial"]


def test_a_pruned_epoch_stays_finished_with_its_figures_and_is_not_resumed_from(tmp_path: Path) -> None:
    for epoch in ("0", "1"):
        write(tmp_path, epoch)
        (tmp_path / epoch / "replay.json").write_text(json.dumps({"accepted_length": 1.5}))
    checkpoints.prune(tmp_path, 1)
    assert not (tmp_path / "1" / "model.safetensors").exists()
    assert checkpoints.finished_epochs(tmp_path) == [0, 1]
    assert selection.lengths(tmp_path) == {0: 1.5, 1: 1.5}
    assert checkpoints.newest(tmp_path) == tmp_path / "0"
