"""Checkpoints of a training: folders that are whole or not there, in float32.

<checkpoints>/
  <epoch>/              a finished epoch (0-based): speculators form, optimizer state, validation figures
  <epoch>-step-<n>/     inside an epoch, after n of its steps: trained tensors and optimizer state only
  initial/              the drafter before training, when it is wanted
  <name>.damaged/       was one of these and is no longer what its record says, or continues one that is lost

A checkpoint is written as `.<name>.tmp`, synced and renamed; nothing finished is overwritten.  `record.json` holds size
and checksum of each of its files, so that a file which a power loss cut after the rename is noticed.  A finished epoch
whose large files were dropped (`prune`) has an empty `pruned` instead: it still counts as finished, its figures stay.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import atomic
from slipstream.artifact import FileRecord, checksum, file_record

INITIAL = "initial"
RECORD, STATE, PRUNED, DAMAGED = "record.json", "training_state.json", "pruned", ".damaged"
MODEL, TRAINED, OPTIMIZER = "model.safetensors", "trained.safetensors", "optimizer.state"
METRICS = "val_metrics.json"
REPLAY = "replay.json"
NAME = re.compile(r"(?P<epoch>\d+)(-step-(?P<step>\d+))?")

log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Position:
    """What is done: all epochs before `epoch` (0-based), and `step` steps of it."""

    epoch: int = 0
    step: int = 0

    @property
    def name(self) -> str:
        """The folder of a checkpoint here: of the epoch that just ended, or inside one."""
        return f"{self.epoch}-step-{self.step}" if self.step else str(self.epoch - 1)

    @staticmethod
    def of(name: str) -> Position | None:
        """The position that a folder's name means, None for other names."""
        found = NAME.fullmatch(name)
        if found is None:
            return None
        epoch, step = int(found["epoch"]), found["step"]
        return Position(epoch, int(step)) if step else Position(epoch + 1)


def temporary_name(name: str) -> str:
    """The name a checkpoint has while it is written."""
    return f".{name}{atomic.SUFFIX}"


def publish(folder: Path, name: str) -> Path:
    """Turns `<folder>/.<name>.tmp` into `<folder>/<name>`, replacing an older one."""
    source, target = folder / temporary_name(name), folder / name
    for path in source.iterdir():
        if path.is_file():
            atomic.fsync_file(path)
    atomic.fsync_folder(source)
    if target.exists():
        shutil.rmtree(target)
    os.replace(source, target)
    atomic.fsync_folder(folder)
    return target


def seal(folder: Path, known: Mapping[str, FileRecord]) -> None:
    """Writes the record of a checkpoint's files; those not `known` are read."""
    names = sorted(path.name for path in folder.iterdir())
    files = {name: known.get(name) or file_record(folder / name) for name in names}
    (folder / RECORD).write_text(json.dumps({name: record.model_dump() for name, record in files.items()}, indent=2))


def records(folder: Path) -> dict[str, FileRecord]:
    """What a checkpoint's files should be; empty without a record that can be read."""
    try:
        found = json.loads((folder / RECORD).read_bytes())
        return {name: FileRecord.model_validate(record) for name, record in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def damage(folder: Path, deep: bool = False) -> str | None:
    """What is wrong with a checkpoint's files, None if nothing: their sizes, with `deep` also their checksums."""
    if (folder / PRUNED).exists():
        return None
    found = _damage(folder, deep)
    # the stage may drop the tensors while another process looks
    return None if (folder / PRUNED).exists() else found


def _damage(folder: Path, deep: bool) -> str | None:
    files = records(folder)
    if not files:
        return f"{folder / RECORD} is missing or unreadable"
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != record.size:
            return f"{path} has {size} bytes instead of {record.size}"
        if deep and checksum(path) != record.checksum:
            return f"{path} has another checksum than when it was written"
    return None


def sweep(folder: Path) -> None:
    """Removes what a killed writer left."""
    for path in folder.glob(f".*{atomic.SUFFIX}"):
        shutil.rmtree(path, ignore_errors=True)


def _positions(folder: Path) -> Iterator[tuple[Position, Path]]:
    if folder.is_dir():
        for path in folder.iterdir():
            if (position := Position.of(path.name)) is not None and path.is_dir() and not path.is_symlink():
                yield position, path


def finished_epochs(folder: Path) -> list[int]:
    """The epochs (0-based) whose checkpoints are complete (or were, and are pruned), ascending."""
    return sorted(at.epoch - 1 for at, path in _positions(folder) if not at.step and damage(path) is None)


def newest(folder: Path) -> Path | None:
    """The complete checkpoint with the most steps, from which training continues; None to begin anew.

    All epochs before it are finished, else what it holds would have no beginning.  Those after it are trained again:
    they are set aside, the reason in a warning.
    """
    finished = finished_epochs(folder)
    lost = next(epoch for epoch in range(len(finished) + 1) if epoch not in finished)
    for position, path in sorted(_positions(folder), reverse=True):
        if position.epoch - (not position.step) > lost:
            complaint: str | None = f"{path}: epoch {lost} before it is lost"
        elif (path / PRUNED).exists():
            complaint = f"{path}: its tensors were dropped, and the checkpoints after it are lost"
        else:
            complaint = damage(path, deep=True)
        if complaint is None:
            return path
        aside = path.with_name(path.name + DAMAGED)
        log.warning("%s: this checkpoint is not used; training continues from the one before it", complaint)
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)
        atomic.fsync_folder(folder)
    return None


def forgo(folder: Path, exported: Callable[[str], bool], over: Callable[[Sequence[int]], bool]) -> None:
    """Lets the tensors of damaged epochs go that nothing needs any more, as `prune` does, instead of training again.

    Those whose figures are whole and which are `exported`, when a later epoch is complete, or when training is `over`
    with these epochs.
    """
    whole = finished_epochs(folder)
    spare = [
        at.epoch - 1
        for at, path in _positions(folder)
        if not at.step and at.epoch - 1 not in whole and _figures_are_whole(path) and exported(path.name)
    ]
    complete = over(sorted([*whole, *spare]))
    for epoch in spare:
        if complete or epoch < max(whole, default=-1):
            log.warning("%s: its exports and figures stay, its tensors go", damage(folder / str(epoch)))
            prune(folder, epoch)


def _figures_are_whole(folder: Path) -> bool:
    known = records(folder)
    return all(
        name in known and (folder / name).is_file() and file_record(folder / name) == known[name]
        for name in (METRICS, REPLAY)
    )


def state(folder: Path) -> dict[str, Any]:
    """A checkpoint's `training_state.json`."""
    found: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    return found


def settle(folder: Path, position: Position) -> None:
    """Drops what a checkpoint here makes useless: those inside epochs before it, damaged ones that it replaces."""
    for path in folder.iterdir():
        at = Position.of(path.name.removesuffix(DAMAGED))
        if at is not None and at <= position and (path.name.endswith(DAMAGED) or (at.step and at < position)):
            shutil.rmtree(path)


def prune(folder: Path, epoch: int) -> None:
    """Drops the tensors of a finished epoch; its figures and the fact that it is finished stay."""
    path = folder / str(epoch)
    (path / PRUNED).touch()
    atomic.fsync_folder(path)  # from here on nobody takes the missing files for damage
    for file in (path / name for name in (MODEL, OPTIMIZER)):
        file.unlink(missing_ok=True)
