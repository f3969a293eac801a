"""How a vocabulary is shown: a picture of coverage against size, and a page for a Prefect artifact.

Both are made from `coverage.json` alone: other sizes cost a pass over the traces' token ids and no extraction.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.plots import INK, MAIN, PALE, canvas, png
from slipstream.vocabulary.coverage import SPLITS

FIGURES, PICTURE = "coverage.json", "coverage.png"
LISTED = 20  # control tokens by name


def picture(figures: Mapping[str, Any]) -> bytes:
    """Coverage against size as a PNG: both splits' curves, the sizes asked for, the vocabulary that was made."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure, axes = canvas(5.6, 3.2)
    colours = dict(zip(SPLITS, (PALE, MAIN), strict=True))
    for split in SPLITS:
        if not figures["supervised_tokens"][split]:
            continue
        axes.plot(figures["curve"]["size"], figures["curve"][split], color=colours[split], label=split)
        axes.plot(figures["by_size"]["size"], figures["by_size"][split], "o", markersize=3, color=colours[split])
        axes.plot([figures["size"]], [figures["coverage"][split]], "D", markersize=6, color=colours[split])
    axes.axvline(figures["size"], color=INK, linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="tokens in the draft vocabulary", ylabel="share of supervised tokens", ylim=(None, 1))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())  # else the ticks between run into each other
    made = "kept from the warm start" if figures["mapping"] == "init_from" else "chosen from the traces"
    axes.set_title(f"Coverage; the {figures['size']:,} tokens {made} are the diamonds", fontsize=9, color=INK)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
    return png(figure)


def markdown(folder: Path) -> str:
    """The page of a vocabulary folder for a Prefect artifact (about 40 kB): sizes and coverages, the picture."""
    figures = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
    rows = [f"| {name} | {value} |" for name, value in _facts(figures)]
    table = figures["by_size"]
    sizes = [
        f"| {size:,} | {_percent(train)} | {_percent(validation)} |"
        for size, train, validation in zip(*(table[name] for name in ("size", *SPLITS)), strict=True)
    ]
    encoded = base64.b64encode((folder / PICTURE).read_bytes()).decode()
    blocks = [
        "# Draft vocabulary",
        "\n".join(["| | |", "| --- | ---: |", *rows]),
        "## Coverage by size, most frequent tokens first",
        "\n".join(["| tokens | train | validation |", "| ---: | ---: | ---: |", *sizes]),
        f"![Coverage](data:image/png;base64,{encoded})",
    ]
    return "\n\n".join(blocks) + "\n"


def _facts(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("draft tokens", f"{figures['size']:,} of {figures['target_size']:,}"),
        ("mapping", "kept from the warm start" if figures["mapping"] == "init_from" else "chosen from the traces"),
        *((f"coverage, {split}", _percent(figures["coverage"][split])) for split in SPLITS),
        *((f"supervised tokens, {split}", f"{figures['supervised_tokens'][split]:,}") for split in SPLITS),
        ("draft tokens that no training row says", f"{figures['unseen']:,}"),
    ]
    if missing := figures["control_tokens_missing"]:
        named = ", ".join(f"{_cell(token['text'])} ({token['id']})" for token in missing[:LISTED])
        more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
        facts.append(("control tokens that the drafter cannot say", f"{len(missing)}: {named}{more}"))
    return facts


def _percent(share: float) -> str:
    return f"{share:.2%}"


def _cell(text: str) -> str:
    """A token's text as it is: no markup of its own, no end of the cell."""
    return re.sub(r"([\\`*|\[\]_])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
