"""The picture of a training: loss and accuracy by step, acceptance by epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream import atomic
from slipstream.drafter.history import History
from slipstream.plots import INK, MAIN, PALE, figure_of, open_frame, small_png

FILE = "training.png"
POINTS = 400  # drawn of a curve by step; more make the file larger and not the picture
SHADES = (MAIN, "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#17becf", "#bcbd22", "#7f7f7f")


def draw(history: History) -> bytes | None:
    """A PNG of three panels; None before anything is logged.  Figures that are not finite leave a gap."""
    if not history.steps:
        return None
    figure = figure_of(11, 2.9)
    loss, accuracy, acceptance = figure.subplots(1, 3)
    for axes in (loss, accuracy, acceptance):
        open_frame(axes)
    _losses(loss, history)
    _accuracies(accuracy, history)
    _acceptance(acceptance, history)
    figure.tight_layout()
    return small_png(figure)


def write(folder: Path, history: History) -> None:
    """Draws into `training.png` of a drafter folder, if there is anything to draw."""
    if (picture := draw(history)) is not None:
        atomic.write_bytes(folder / FILE, picture)


def smooth(values: Sequence[float]) -> list[float]:
    """Each value's mean with those of the 2 % of steps before it; what is not finite does not count."""
    width = max(1, len(values) // 50)
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    found = []
    for end in range(1, len(values) + 1):
        start = max(0, end - width)
        count = counts[end] - counts[start]
        found.append((sums[end] - sums[start]) / count if count else math.nan)
    return found


def _curve(axes: Any, history: History, values: Sequence[float], **look: Any) -> None:
    """By step, smoothed and thinned."""
    every = 1 + len(values) // POINTS
    steps = [step.step for step in history.steps]
    axes.plot(steps[::every], smooth(values)[::every], lw=1.2, **look)


def _losses(axes: Any, history: History) -> None:
    raw = [step.loss for step in history.steps]
    every = 1 + len(raw) // POINTS
    axes.plot([step.step for step in history.steps][::every], raw[::every], color=PALE, lw=0.6)
    _curve(axes, history, raw, color=MAIN, label="training")
    ends = [epoch.step for epoch in history.epochs]
    axes.plot(ends, [epoch.loss for epoch in history.epochs], "o-", color="#d62728", ms=4, lw=1, label="validation")
    axes.set(xlabel="step")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("Loss", fontsize=10, color=INK)


def _accuracies(axes: Any, history: History) -> None:
    ends = [epoch.step for epoch in history.epochs]
    for position in range(max(len(step.accuracy) for step in history.steps)):
        color = SHADES[position % len(SHADES)]
        values = [_at(step.accuracy, position) for step in history.steps]
        _curve(axes, history, values, color=color, label=f"draft step {position + 1}")
        axes.plot(ends, [_at(epoch.accuracy, position) for epoch in history.epochs], "o", color=color, ms=4)
    axes.set(xlabel="step (dots: validation)", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("Accuracy, teacher-forced", fontsize=10, color=INK)


def _acceptance(axes: Any, history: History) -> None:
    measured = [epoch for epoch in history.epochs if epoch.acceptance]
    axes.set_title("Acceptance by draft position, replayed", fontsize=10, color=INK)
    if not measured:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no epoch replayed yet", ha="center", color=INK, fontsize=9, transform=axes.transAxes)
        return
    numbers = [epoch.epoch for epoch in measured]
    for position in range(max(len(epoch.acceptance) for epoch in measured)):
        rates = [_at(epoch.acceptance, position) for epoch in measured]
        axes.plot(
            numbers, rates, "o-", color=SHADES[position % len(SHADES)], ms=4, lw=1, label=f"position {position + 1}"
        )
    if history.best is not None:
        axes.axvline(history.best, color=INK, lw=0.8, ls=":", label="best")
    axes.set(xlabel="epoch", ylim=(0, 1), xticks=numbers[:: 1 + len(numbers) // 10])
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def _at(values: Sequence[float], position: int) -> float:
    return values[position] if position < len(values) else math.nan
