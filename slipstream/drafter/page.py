"""The page of a training for a Prefect artifact: a row an epoch, and the curves."""

from __future__ import annotations

import base64
from pathlib import Path

from slipstream.drafter import curves, history
from slipstream.drafter.history import Epoch, slashed, text

COLUMNS = (
    "epoch",
    "training loss",
    "validation loss",
    "accuracy",
    "accepted length",
    "acceptance",
    "lr",
    "tokens/s",
)
NONE = "n/a"


def markdown(folder: Path) -> str:
    """The page of a drafter folder, also while it is being trained; under 100 kB, of which the picture has most."""
    seen = history.read(folder)
    blocks = ["# Training"]
    if wrong := [f"{name} of epoch {epoch.epoch}" for epoch in seen.epochs for name in epoch.wrong]:
        blocks.append(f"**Not finite:** {', '.join(wrong)}. Do not use these epochs.")
    if seen.epochs:
        rows = [_row(epoch, epoch.epoch == seen.best) for epoch in seen.epochs]
        blocks.append("\n".join([_cells(COLUMNS), _cells(["---", *["---:"] * (len(COLUMNS) - 1)]), *rows]))
    else:
        blocks.append("No epoch is finished yet.")
    if seen.skipped:
        blocks.append(
            f"{seen.skipped:,} steps had no supervised token and changed nothing (`skipped` in the metrics file)."
        )
    if picture := curves.draw(seen):
        blocks.append(f"![Loss, accuracy and acceptance](data:image/png;base64,{base64.b64encode(picture).decode()})")
    return "\n\n".join(blocks) + "\n"


def _row(epoch: Epoch, best: bool) -> str:
    return _cells(
        [
            f"**{epoch.epoch} (best)**" if best else str(epoch.epoch),
            text(epoch.train_loss),
            text(epoch.loss),
            slashed(epoch.accuracy) or NONE,
            NONE if epoch.accepted_length is None else text(epoch.accepted_length),
            slashed(epoch.acceptance) or NONE,
            epoch.lr or NONE,
            NONE if epoch.tokens_per_s is None else f"{epoch.tokens_per_s:,.0f}",
        ]
    )


def _cells(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"
