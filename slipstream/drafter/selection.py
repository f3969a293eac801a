"""Which epoch is the best and when there is no use in another: by accepted length, replayed on validation rows.

Loss and teacher-forced accuracy keep improving after the accepted length has peaked.  Every finished epoch's checkpoint
holds its figures as `replay.json`, from before it gets its name and also when its tensors are dropped, so a resumed
training and the stage decide as an undisturbed training:

{"accepted_length": 2.1, "acceptance_per_position": [0.6, 0.3, 0.2], "drafts": 4100,
 "coverage": 0.99, "accuracy_all": 0.7}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.drafter import checkpoints
from slipstream.errors import Damaged


def figures(folder: Path, name: str) -> dict[str, Any]:
    """What the replay of a finished checkpoint gave; raises Damaged without it."""
    path = folder / name / checkpoints.REPLAY
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        float(found["accepted_length"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path}: not the figures of a replay ({error}); delete this checkpoint") from error
    return found


def lengths(folder: Path) -> dict[int, float]:
    """The accepted length of every finished epoch."""
    return {epoch: figures(folder, str(epoch))["accepted_length"] for epoch in checkpoints.finished_epochs(folder)}


def best(found: Mapping[int, float]) -> int | None:
    """The epoch with the longest accepted length, the earliest of equals; None without one."""
    return max(sorted(found), key=lambda epoch: found[epoch], default=None)


def over(found: Mapping[int, float], epochs: int, patience: int | None) -> bool:
    """Whether training is complete: all `epochs` are there, or `patience` in a row brought nothing longer."""
    if len(found) >= epochs:
        return True
    longest = best(found)
    return patience is not None and longest is not None and max(found) - longest >= patience
