"""The replay of an epoch on its validation rows, all ranks together: the figures that `selection` decides by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from slipstream.acceptance.replay import Replay, replay


def figures(found: Replay) -> dict[str, Any]:
    """What `replay.json` holds; `accuracy_all` is of all supervised tokens, those outside the draft vocabulary too."""
    return {
        "accepted_length": found.accepted_length,
        "acceptance_per_position": found.rates,
        "drafts": found.drafts,
        "coverage": found.coverage,
        "accuracy_all": found.accuracy,
    }


def flat(found: Mapping[str, Any]) -> dict[str, float]:
    """The figures as metrics: one number each, as trackers take them."""
    rates = {f"acceptance_{position}": rate for position, rate in enumerate(found["acceptance_per_position"])}
    return {name: value for name, value in found.items() if name != "acceptance_per_position"} | rates


def measure(
    model: Any, batches: Iterable[Mapping[str, Any]], tokens: int, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Replays validation rows as validation runs, in eval mode and under autocast; every rank returns the same figures.

    `batches` are this rank's (`replay_rows`), `device` is cuda or cpu.
    """
    training = model.training
    model.eval()
    with torch.autocast(device, dtype=dtype):
        found = replay(model, batches, tokens)
    model.train(training)
    if dist.is_initialized():
        counts = torch.tensor([found.drafts, found.supervised, found.covered, found.right, *found.accepted])
        counts = counts.to(next(model.parameters()).device)
        dist.all_reduce(counts)
        drafts, supervised, covered, right, *accepted = counts.tolist()
        found = Replay(drafts, tuple(accepted), supervised, covered, right)
    return figures(found)
