"""The last-state probe: the stored final state must give the server's own next-token distribution.

`log_softmax(head(norm(h)))` against the server's `prompt_logprobs` of the same tokens.  The argmax alone is too weak: a
doubled RMS norm keeps 98 to 100 % of them.  Hence the mean difference over the server's likeliest tokens as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.features.tolerance import MIN_AGREEMENT, Tolerance
from slipstream.verifier_ends import Head

POSITIONS = 256  # of one sample, evenly spaced: 0.6 TFLOP at a head of 163,840 x 7,168


@dataclass(frozen=True)
class Agreement:
    """How well a final state explains the server: shares and nats over `positions`.

    `near_ties` positions, where two tokens are nearer to each other than the type resolves, count in the mean
    difference and not in the argmax.
    """

    positions: int
    near_ties: int
    argmax: float
    mean_difference: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether these are the server's distributions; of fewer than 100 positions one may disagree."""
        decided = self.positions - self.near_ties
        missed = round((1 - self.argmax) * decided)
        return missed <= math.ceil((1 - MIN_AGREEMENT) * decided) and self.mean_difference <= tolerance.logprobs


def compare(
    head: Head, normed: torch.Tensor, served: Sequence[dict[int, float]], tolerance: Tolerance
) -> Agreement | None:
    """`normed` float32 [tokens, hidden] after the final norm; None when there is no position to compare.

    `served[p]` is the server's distribution after tokens 0 … p - 1, which row p - 1 must give.
    """
    last = min(len(served), len(normed) + 1)
    every = max(1, -(-(last - 1) // POSITIONS))
    places = list(range(1, last, every))
    if not places:
        return None
    ours = head.log_probabilities(normed[[place - 1 for place in places]])
    agree = ties = 0
    differences: list[float] = []
    for row, place in zip(ours, places, strict=True):
        best = max(served[place], key=lambda token: served[place][token])
        differences += [abs(float(row[token]) - value) for token, value in served[place].items()]
        mine = int(row.argmax())
        if mine == best:
            agree += 1
        elif abs(float(row[mine]) - float(row[best])) <= tolerance.tie:
            ties += 1
    decided = len(places) - ties
    return Agreement(
        positions=len(places),
        near_ties=ties,
        argmax=agree / decided if decided else 1.0,
        mean_difference=sum(differences) / len(differences),
    )
