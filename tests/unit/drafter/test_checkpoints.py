"""Epoch folders: whole or not there; the figure that names the best one."""

from __future__ import annotations

import json
import os
import shutil
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


def finish(folder: Path, *epochs: int) -> None:
    """Complete checkpoints of epochs with their figures."""
    for epoch in epochs:
        (folder / str(epoch)).mkdir()
        for name in ("model.safetensors", "val_metrics.json", "replay.json"):
            (folder / str(epoch) / name).write_text(json.dumps({"accepted_length": 1.5}))
        checkpoints.seal(folder / str(epoch), {})


def test_training_continues_before_an_epoch_that_is_lost(tmp_path: Path) -> None:
    """Later checkpoints cannot bring it back: without this, every further run ends with epochs [0, 2]."""
    finish(tmp_path, 0, 1, 2)
    write(tmp_path, "3-step-5")
    shutil.rmtree(tmp_path / "1")
    assert checkpoints.newest(tmp_path) == tmp_path / "0"
    assert checkpoints.finished_epochs(tmp_path) == [0]
    finish(tmp_path, 1, 2)
    checkpoints.settle(tmp_path, Position(3))
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3-step-5.damaged"]


def test_epochs_whose_tensors_are_dropped_are_trained_again_when_those_after_them_are_lost(tmp_path: Path) -> None:
    finish(tmp_path, 0, 1, 2)
    checkpoints.prune(tmp_path, 1)
    os.truncate(tmp_path / "2" / "model.safetensors", 0)
    assert checkpoints.newest(tmp_path) == tmp_path / "0"
    assert checkpoints.finished_epochs(tmp_path) == [0]


@pytest.mark.parametrize(
    ("damaged", "exported", "over", "finished"),
    [
        ([0], "012", False, [0, 1, 2]),  # a later one is complete
        ([2], "012", False, [0, 1]),  # training goes on from its tensors
        ([2], "012", True, [0, 1, 2]),
        ([0, 2], "012", True, [0, 1, 2]),
        ([0], "12", True, [1, 2]),  # its export can only be made from its tensors
    ],
)
def test_damage_to_tensors_that_nothing_needs_costs_no_training(
    tmp_path: Path, damaged: list[int], exported: str, over: bool, finished: list[int]
) -> None:
    finish(tmp_path, 0, 1, 2)
    for epoch in damaged:
        os.truncate(tmp_path / str(epoch) / "model.safetensors", 0)
    checkpoints.forgo(tmp_path, exported.__contains__, lambda epochs: over and epochs == [0, 1, 2])
    assert checkpoints.finished_epochs(tmp_path) == finished


def test_an_epoch_without_its_figures_is_not_forgone(tmp_path: Path) -> None:
    finish(tmp_path, 0, 1)
    os.truncate(tmp_path / "0" / "replay.json", 0)
    checkpoints.forgo(tmp_path, lambda name: True, lambda epochs: True)
    assert checkpoints.finished_epochs(tmp_path) == [1]


def test_an_epoch_dropped_while_another_process_looks_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that count differently would wait for each other for ever."""
    finish(tmp_path, 0)
    before = checkpoints.records

    def dropped(folder: Path) -> object:
        checkpoints.prune(tmp_path, 0)
        return before(folder)

    monkeypatch.setattr(checkpoints, "records", dropped)
    assert checkpoints.damage(tmp_path / "0") is None
