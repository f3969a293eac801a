"""Pictures of a traces artifact from its summary, as PNG bytes; None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import isfinite, log2
from typing import Any

from slipstream.plots import INK, MAIN, PALE, canvas, figure_of, open_frame, png

BARS = 60  # most moments of the throughput picture


def lengths(figures: Mapping[str, Any]) -> bytes | None:
    """Prompt and output tokens a row, over a logarithmic axis: equal areas are equal shares of the rows."""
    named = {"prompt": figures.get("prompt_lengths") or {}, "output": figures.get("output_lengths") or {}}
    counted = {name: {int(edge): count for edge, count in bins.items()} for name, bins in named.items() if bins}
    if not counted:
        return None
    figure = figure_of(5, 0.8 + 1.1 * len(counted))
    panels = figure.subplots(len(counted), sharex=True, squeeze=False)[:, 0]
    for axes, (name, bins) in zip(panels, counted.items(), strict=True):
        edges, heights = outline(bins)
        open_frame(axes).stairs(heights, edges, fill=True, color=PALE if name == "prompt" else MAIN)
        axes.set(xscale="log", ylabel=name, yticks=[], ylim=(0, None))
    low, high = panels[-1].get_xlim()
    marks = [1 << power for power in range(32) if low <= 1 << power <= high]
    marks = marks[:: 1 + len(marks) // 9]
    panels[-1].set_xticks(marks, [f"{mark:,}" for mark in marks])
    panels[-1].set_xticks([], minor=True)
    panels[-1].set_xlabel("tokens a row (areas are shares of the rows)")
    panels[0].set_title("Trace lengths", fontsize=10, color=INK)
    return png(figure)


def outline(bins: Mapping[int, int]) -> tuple[list[int], list[float]]:
    """Edges of neighbouring bins and rows an octave in each, from the summary's bins (eight an octave from 16 on).

    The fewer rows, the wider the bins, so that noise does not look like structure.
    """
    rows = sum(bins.values())
    parts = 8 if rows >= 1000 else 4 if rows >= 100 else 2
    counts: dict[int, int] = {}
    for edge, count in bins.items():
        step = _step(max(1, edge), parts)
        lower = max(1, edge) // step * step
        counts[lower] = counts.get(lower, 0) + count
    edges = [min(counts)]
    while edges[-1] <= max(counts):
        edges.append(edges[-1] + _step(edges[-1], parts))
    return edges, [counts.get(lower, 0) / log2(upper / lower) for lower, upper in pairwise(edges)]


def _step(tokens: int, parts: int) -> int:
    """The width of the bin that `tokens` is in, with `parts` bins an octave."""
    return max(1, (1 << (tokens.bit_length() - 1)) // parts)


def throughput(execution: Mapping[str, Any] | None) -> bytes | None:
    """Output tokens a second over the time of the execution (`Outcome` as a mapping), and their mean."""
    execution = execution or {}
    measured = execution.get("throughput") or {}
    speeds = [speed if speed is not None and isfinite(speed) else 0.0 for speed in measured.get("tokens_per_s") or ()]
    if not any(speeds):
        return None
    bucket = measured["bucket_s"]
    group = -(-len(speeds) // BARS)
    starts = range(0, len(speeds), group)
    heights = [sum(part) / len(part) for part in (speeds[start : start + group] for start in starts)]
    unit, seconds = _unit(len(speeds) * bucket)
    edges = [start * bucket / seconds for start in (*starts, len(speeds))]
    figure, axes = canvas(5, 2.2)
    axes.stairs(heights, edges, fill=True, color=MAIN)
    if execution.get("seconds"):
        mean = execution["output_tokens"] / execution["seconds"]
        axes.axhline(mean, color=INK, lw=1, ls="--")
        axes.text(edges[-1], mean, f" mean {mean:,.0f}", va="center", color=INK, fontsize=9)
    axes.set(xlabel=f"{unit} (tokens count when their answer ends)", xlim=(0, edges[-1]), ylim=(0, None))
    axes.set_title("Output tokens a second", fontsize=10, color=INK)
    return png(figure)


def _unit(seconds: float) -> tuple[str, int]:
    """The unit for a time axis of this length, and its seconds."""
    if seconds < 180:
        return "seconds", 1
    return ("minutes", 60) if seconds < 3 * 3600 else ("hours", 3600)
