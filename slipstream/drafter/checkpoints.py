"""Checkpoints of a training: one folder an epoch, whole or not there, in float32.

`<checkpoints>/<epoch>/` holds what speculators writes (`model.safetensors`, `config.json`, optimizer and
scheduler state, `training_state.json`) and `val_metrics.json`.  It is written as `.<epoch>.tmp`, synced and
renamed, so a folder with a number is a finished epoch and a killed run continues after the newest one.
speculators stores bfloat16; float32 here lets a resumed run continue as the undisturbed one.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from slipstream import atomic

INITIAL = "initial"


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


def sweep(folder: Path) -> None:
    """Removes what a killed writer left."""
    for path in folder.glob(f".*{atomic.SUFFIX}"):
        shutil.rmtree(path, ignore_errors=True)


def finished_epochs(folder: Path) -> list[int]:
    """The epochs (0-based) whose checkpoints are complete, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.is_dir() and path.name.isdigit())


def validation_metrics(folder: Path, epoch: int) -> dict[str, float]:
    """speculators' validation metrics of a finished epoch."""
    metrics: dict[str, float] = json.loads((folder / str(epoch) / "val_metrics.json").read_text())
    return metrics


def expected_accepted_length(metrics: dict[str, float]) -> float:
    """1 + the sum over k of the probability that drafts 1 … k are all right, from validation metrics.

    `cond_acc_k_epoch` is the share of right drafts at step k where all before it were right (teacher-forced),
    so the product over steps is the probability of a chain.  Source: speculators.models.eagle3.metrics.
    """
    length, chain, step = 1.0, 1.0, 0
    while (accuracy := metrics.get(f"cond_acc_{step}_epoch")) is not None:
        chain *= accuracy
        length += chain
        step += 1
    return length
