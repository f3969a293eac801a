"""The report's pictures, as PNG bytes: what people would rather look at than read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slipstream.plots import INK, MAIN, PALE, canvas, png


def acceptance(figures: Mapping[str, Any]) -> bytes:
    """Bars: the share of drafts accepted at each position, beside the untrained drafter's when measured."""
    figure, axes = canvas(5, 2.8)
    rates: Sequence[float] = figures["acceptance_per_position"]
    positions = list(range(1, len(rates) + 1))
    axes.bar(positions, rates, width=0.5, color=MAIN, label="trained")
    for position, rate in zip(positions, rates, strict=True):
        axes.text(position, rate + 0.02, f"{rate:.2f}", ha="center", color=INK, fontsize=9)
    floor = (figures.get("untrained") or {}).get("acceptance_per_position")
    if floor:
        axes.bar(range(1, len(floor) + 1), floor, width=0.5, color=PALE, label="untrained")
        axes.legend(frameon=False, fontsize=8)
    axes.set(xlabel="draft position", ylabel="accepted", ylim=(0, 1.08), xticks=positions)
    axes.set_title("Acceptance on held-out prompts", fontsize=10, color=INK)
    return png(figure)


def speed(figures: Mapping[str, Any]) -> bytes:
    """Bars: tokens a second without and with the drafter."""
    figure, axes = canvas(5, 1.8)
    speeds = {name: figures["tokens_per_second"][name] for name in ("speculative", "baseline")}
    axes.barh(list(speeds), list(speeds.values()), color=[MAIN, PALE], height=0.5)
    for row, value in enumerate(speeds.values()):
        axes.text(value, row, f" {value:,.0f}", va="center", color=INK, fontsize=9)
    axes.set_xlim(0, max(speeds.values()) * 1.15)
    axes.set_title(f"Output tokens a second ({figures['speed_up']:.2f}x)", fontsize=10, color=INK)
    return png(figure)


def training(rows: Iterable[Mapping[str, Any]]) -> bytes | None:
    """Lines: training loss and first-step accuracy over steps, validation loss at each epoch's end."""
    rows = list(rows)
    train = {row["global_step"]: row["train"] for row in rows if "train" in row}
    if not train:
        return None
    figure, axes = canvas(7, 2.8)
    steps = sorted(train)
    axes.plot(steps, [train[step]["loss"] for step in steps], color=MAIN, lw=1, label="training loss")
    ends, losses = [], []
    last = steps[0]
    for row in rows:
        if "train" in row:
            last = row["global_step"]
        elif "loss_epoch" in row.get("val", {}):
            ends.append(last)
            losses.append(row["val"]["loss_epoch"])
    axes.plot(ends, losses, "o-", color="#d62728", ms=4, lw=1, label="validation loss")
    axes.set(xlabel="step", ylabel="loss")
    accuracy = axes.twinx()
    accuracy.plot(
        steps, [train[step]["full_acc_0"] for step in steps], color="#2ca02c", lw=1, alpha=0.6, label="accuracy, step 1"
    )
    accuracy.set(ylim=(0, 1), ylabel="accuracy")
    accuracy.spines["top"].set_visible(False)
    handles = [*axes.get_legend_handles_labels()[0], *accuracy.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="center right")
    axes.set_title("Training", fontsize=10, color=INK)
    return png(figure)
