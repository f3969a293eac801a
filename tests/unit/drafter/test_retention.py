"""Epochs are exported as they become complete; checkpoints that nobody needs go."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slipstream.drafter import checkpoints
from slipstream.drafter.retention import Retention


def finish(store: Path, epoch: int, accepted_length: float) -> None:
    """A complete checkpoint of an epoch."""
    folder = store / str(epoch)
    folder.mkdir(parents=True)
    for file in ("model.safetensors", "optimizer.state"):
        (folder / file).write_text("x")
    (folder / "replay.json").write_text(json.dumps({"accepted_length": accepted_length}))
    checkpoints.seal(folder, {})


def kept(store: Path) -> list[int]:
    """The epochs whose tensors are there."""
    return sorted(int(path.parent.name) for path in store.glob("*/model.safetensors"))


def test_best_and_last_stay_and_every_epoch_is_exported_once(tmp_path: Path) -> None:
    exported: list[str] = []
    retention = Retention(tmp_path, False, exported.append)
    retention.poll()
    stay = []
    for epoch, length in enumerate((1.5, 2.5, 2.0, 2.5, 1.0)):
        finish(tmp_path, epoch, length)
        retention.poll()
        stay.append(kept(tmp_path))
    assert exported == ["0", "1", "2", "3", "4"]
    assert stay == [[0], [1], [1, 2], [1, 3], [1, 4]]  # of equals the earlier is the best
    assert checkpoints.finished_epochs(tmp_path) == [0, 1, 2, 3, 4]


def test_all_stay_when_the_configuration_says_so(tmp_path: Path) -> None:
    for epoch in range(4):
        finish(tmp_path, epoch, 1.0)
    exported: list[str] = []
    Retention(tmp_path, True, exported.append).poll()
    assert kept(tmp_path) == [0, 1, 2, 3]
    assert exported == ["0", "1", "2", "3"]


def test_nothing_goes_before_its_export_is_there(tmp_path: Path) -> None:
    for epoch in range(4):
        finish(tmp_path, epoch, 1.0)

    def fail(name: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        Retention(tmp_path, False, fail).poll()
    assert kept(tmp_path) == [0, 1, 2, 3]


def test_a_kill_while_an_epoch_is_dropped_leaves_it_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for epoch in range(3):
        finish(tmp_path, epoch, 1.0)

    def killed(self: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        Retention(tmp_path, False, lambda name: None).poll()
    monkeypatch.undo()
    assert checkpoints.finished_epochs(tmp_path) == [0, 1, 2]
    Retention(tmp_path, False, lambda name: None).poll()
    assert sorted(os.listdir(tmp_path / "1")) == ["pruned", "record.json", "replay.json"]
