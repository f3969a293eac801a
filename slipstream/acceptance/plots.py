"""The report's pictures, as PNG bytes: what people would rather look at than read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
