"""Learning-rate schedules that begin at any step: a function of the step alone, so a resumed one has nothing to load.

speculators passes the epoch's index as the step when it resumes, and then depends on what the optimizer's file holds
(its issue 1048).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup


def schedulers(optimizers: Sequence[Any], kind: str, warmup_steps: int, total_steps: int, done: int) -> list[Any]:
    """A schedule (cosine, linear or none) for each optimizer, whose groups hold their peak rate, after `done` steps."""
    if kind == "none":
        return []
    make = get_linear_schedule_with_warmup if kind == "linear" else get_cosine_schedule_with_warmup
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return [make(optimizer, warmup_steps, total_steps, last_epoch=done - 1) for optimizer in optimizers]
