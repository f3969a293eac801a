"""What a person sees while training runs: the worker's metrics file as progress in steps, curves after every epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.drafter import checkpoints, curves, history, metrics_file
from slipstream.drafter.history import EPOCH, accuracies, learning_rate, not_finite, number, slashed, text, throughput
from slipstream.progress import Progress, Report

LINES = 20  # over which the throughput is taken


class Follower:
    """Reads what is appended to the metrics file from now on."""

    def __init__(self, path: Path, report: Report) -> None:
        self._path, self._report = path, report
        self._position = path.stat().st_size if path.exists() else 0
        self._steps, self._devices, self._skipped = 0, 1, 0
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=LINES)
        self._validation: dict[str, str] = {}

    def poll(self) -> None:
        """Reports the newest state, if a line tells one."""
        news = False
        for line in self._new_lines():
            if "training" in line:
                self._steps, self._devices = int(line["training"]["steps"]), int(line["training"]["devices"])
                self._recent.clear()
            elif "train" in line:
                if self._recent and self._recent[-1]["epoch"] != line["epoch"]:
                    self._recent.clear()  # validation lies between them
                self._recent.append(line)
                news = True
            elif "skipped" in line:
                self._skipped += 1
            elif "val" in line:
                self._validation = _validation(line)
                news = True
        if news and self._recent and self._steps:
            self._report(self._progress(self._recent[-1]))

    def _new_lines(self) -> list[Mapping[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._position:
                self._position = 0  # a resumed process cut the file
            file.seek(self._position)
            whole = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        self._position += sum(map(len, whole))
        return [line for line in map(metrics_file.parse, whole) if line]

    def _progress(self, line: Mapping[str, Any]) -> Progress:
        figures, done = line["train"], int(line["global_step"]) + 1
        shown: dict[str, float | int | str] = {
            "epoch": int(line["epoch"]),
            "loss": text(number(figures["loss"])),
            "accuracy": slashed(accuracies(figures)),
            "after right ones": slashed(accuracies(figures, "cond_acc")),
            "lr": learning_rate(line.get("lr")),
        }
        speed = throughput(self._recent, self._devices)
        if speed is not None:
            shown["tokens/s"] = f"{speed:,.0f}"
        shown |= self._validation
        if self._skipped:
            shown["without a supervised token"] = self._skipped
        if wrong := not_finite(figures):
            shown["NOT FINITE"] = " ".join(wrong)
        known = {name: value for name, value in shown.items() if value != ""}
        return Progress(min(done, self._steps), self._steps, "steps", known)


def _validation(line: Mapping[str, Any]) -> dict[str, str]:
    figures = {name.removesuffix(EPOCH): value for name, value in line["val"].items()}
    shown = {"validation loss": text(number(figures["loss"]))} if "loss" in figures else {}
    if accuracy := accuracies(figures):
        shown["validation accuracy"] = slashed(accuracy)
    return shown


class Watch:
    """Follows the training in a drafter folder; after an epoch, draws the curves and calls `on_epoch`."""

    def __init__(self, folder: Path, report: Report, on_epoch: Callable[[Path], None] | None = None) -> None:
        self._folder, self._on_epoch = folder, on_epoch
        self._follower = Follower(folder / metrics_file.FILE, report)
        self._known = self._finished()

    def poll(self) -> None:
        """Tells what is new."""
        self._follower.poll()
        if (finished := self._finished()) != self._known:
            self._known = finished
            curves.write(self._folder, history.read(self._folder))
            if self._on_epoch is not None:
                self._on_epoch(self._folder)

    def _finished(self) -> list[int]:
        return checkpoints.finished_epochs(self._folder / "checkpoints")
