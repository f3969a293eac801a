"""What a training has shown so far, from the lines of its metrics file and the replays of its epochs.

A line is one of

* what speculators logs: `train` or `val` figures, `epoch`, `global_step`, `lr`, `profile`;
* the beginning of a process, its steps those of all epochs: `{"training": {"steps": 1, "epochs": 1, "devices": 1}}`;
* a step without a supervised token: `{"skipped": {"rows": [3]}, "epoch": 0, "global_step": 7}`.

Figures that are not finite stand there as text, for JSON has no word for them; here they are floats again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from slipstream.drafter import checkpoints, metrics_file, selection
from slipstream.errors import Damaged

Line = Mapping[str, Any]
EPOCH = "_epoch"  # speculators' suffix of validation figures


@dataclass(frozen=True)
class Step:
    """One logged training step: its loss and the accuracy of each training-time-test step."""

    step: int
    epoch: int
    loss: float
    accuracy: tuple[float, ...]


@dataclass(frozen=True)
class Epoch:
    """An epoch with its validation: `accuracy` of each step, `acceptance` of each position of the replay."""

    epoch: int
    step: int  # steps trained at its end
    train_loss: float
    loss: float
    accuracy: tuple[float, ...]
    accepted_length: float | None
    acceptance: tuple[float, ...]
    lr: str
    tokens_per_s: float | None
    wrong: tuple[str, ...] = ()  # figures that are not finite


@dataclass(frozen=True)
class History:
    """A training's logged steps and finished epochs, ascending; `skipped` steps had no supervised token."""

    steps: Sequence[Step] = ()
    epochs: Sequence[Epoch] = ()
    skipped: int = 0

    @property
    def best(self) -> int | None:
        """The epoch with the longest accepted length, the earliest of equals; None without a replay."""
        return selection.best({e.epoch: e.accepted_length for e in self.epochs if e.accepted_length is not None})


def of(lines: Iterable[Line], replays: Mapping[int, Mapping[str, Any]]) -> History:
    """The history that these lines and replays (by epoch) tell."""
    trained: dict[int, dict[int, Line]] = {}
    steps: dict[int, Step] = {}
    epochs: dict[int, Epoch] = {}
    begun: list[int] = []  # steps at which a process began to log
    devices, resumed, skipped = 1, True, 0
    for line in lines:
        if "training" in line:
            devices, resumed = int(line["training"]["devices"]), True
        elif "train" in line:
            step, epoch = int(line["global_step"]), int(line["epoch"])
            if resumed:
                begun.append(step)
                resumed = False
            trained.setdefault(epoch, {})[step] = line
            figures = line["train"]
            steps[step] = Step(step, epoch, number(figures["loss"]), accuracies(figures))
        elif "skipped" in line:
            skipped += 1
        elif "val" in line:
            epoch = int(line["epoch"])
            of_epoch = list(trained.get(epoch, {}).values())
            epochs[epoch] = _epoch(epoch, line["val"], of_epoch, begun, devices, replays.get(epoch) or {})
    return History([steps[step] for step in sorted(steps)], [epochs[epoch] for epoch in sorted(epochs)], skipped)


def read(folder: Path) -> History:
    """The history of the training in a drafter folder."""
    return of(metrics_file.read(folder / metrics_file.FILE), _replays(folder / "checkpoints"))


def _replays(store: Path) -> dict[int, Mapping[str, Any]]:
    """The replays of epochs; what the training process set aside, or replaces at this moment, does not count."""
    found: dict[int, Mapping[str, Any]] = {}
    for path in store.glob(f"*/{checkpoints.REPLAY}"):
        if path.parent.name.isdecimal():
            with suppress(Damaged):
                found[int(path.parent.name)] = selection.figures(store, path.parent.name)
    return found


def _epoch(
    epoch: int, figures: Line, trained: Sequence[Line], begun: Sequence[int], devices: int, replay: Mapping[str, Any]
) -> Epoch:
    values = {name.removesuffix(EPOCH): number(value) for name, value in figures.items()}
    length = replay.get("accepted_length")
    return Epoch(
        epoch=epoch,
        step=int(trained[-1]["global_step"]) + 1 if trained else 0,
        train_loss=fmean(number(line["train"]["loss"]) for line in trained) if trained else math.nan,
        loss=values.get("loss", math.nan),
        accuracy=accuracies(values),
        accepted_length=None if length is None else number(length),
        acceptance=tuple(map(number, replay.get("acceptance_per_position") or ())),
        lr=learning_rate(trained[-1].get("lr")) if trained else "",
        tokens_per_s=throughput(trained, devices, begun),
        wrong=tuple(not_finite({**figures, **{name: replay[name] for name in replay.keys() & {"accepted_length"}}})),
    )


def number(value: Any) -> float:
    """A figure of the metrics file as a float; `nan` and `inf` stand there as text."""
    return float(value)


def accuracies(figures: Line, name: str = "full_acc") -> tuple[float, ...]:
    """`<name>_0`, `<name>_1`, … as far as there are any."""
    found: list[float] = []
    while (value := figures.get(f"{name}_{len(found)}")) is not None:
        found.append(number(value))
    return tuple(found)


def learning_rate(lr: Any) -> str:
    """`3e-05`, or one for each of Muon and AdamW."""
    if isinstance(lr, Mapping):
        return ", ".join(f"{name} {number(value):.3g}" for name, value in lr.items())
    return "" if lr is None else f"{number(lr):.3g}"


def not_finite(figures: Line) -> list[str]:
    """The names of the figures that are NaN or infinite."""
    return [name for name, value in figures.items() if not math.isfinite(number(value))]


def throughput(lines: Sequence[Line], devices: int, begun: Sequence[int] = ()) -> float | None:
    """Tokens a second of all devices together over these training lines of one epoch; None when they do not tell.

    Steps over wall time between lines, waits for data and all: a step that is timed by itself absorbs what the GPU
    still had to do for the unlogged ones before it.  Tokens of a step are the mean over the timed ones, which are this
    process's alone; packing fills the devices evenly.  Pairs between which a process ended (`begun` has the steps at
    which one began) do not count.
    """
    timed = [line["profile"] for line in lines if line.get("profile")]
    if not timed:
        return None
    tokens = fmean(number(step["tokens_per_s"]) * number(step["step_ms"]) / 1000 for step in timed)
    done = seconds = 0.0
    for before, after in pairwise(lines):
        if after["global_step"] in begun or after["global_step"] <= before["global_step"]:
            continue
        done += after["global_step"] - before["global_step"]
        seconds += after["time"] - before["time"]
    if done and seconds > 0:
        return devices * tokens * done / seconds
    return devices * number(timed[-1]["tokens_per_s"])


def text(value: float) -> str:
    """Four digits after the point; `nan`, `inf` for what is not finite."""
    return f"{value:.4f}" if math.isfinite(value) else str(value)


def slashed(values: Iterable[float]) -> str:
    """`0.71/0.52/0.40`."""
    return "/".join(f"{value:.2f}" for value in values)
