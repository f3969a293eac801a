"""Which layer's state each position of a store holds, by comparison with a capture of the same tokens on a server.

The distance of two states is the median over the tokens of |a - b| / |b|: one token with huge activations (the first,
in most models) would decide a norm over all of them.  Two captures of the same layer differ by about 1 % in bfloat16
and 3 % in float8, neighbouring layers by 20 % and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.errors import InputError
from slipstream.features.distance import relative_rows
from slipstream.imports.final_state import AFTER, BEFORE
from slipstream.verifier_ends import Head

NEAR = 0.05  # largest distance of the same state
APART = 2.0  # the next nearest must be so many times as far


@dataclass(frozen=True)
class Match:
    """The reference that a position is nearest to: its id (vLLM's), whether normed, and both distances."""

    layer_id: int
    final_state: str
    distance: float
    next_distance: float

    @property
    def sure(self) -> bool:
        """Whether it is that state and no other."""
        return self.distance <= NEAR and self.next_distance >= APART * self.distance


def match(
    states: torch.Tensor, reference: torch.Tensor, layer_ids: Sequence[int], final: int, head: Head | None
) -> list[Match]:
    """What each position of float32 `states` [tokens, positions, hidden] is.

    `reference` float32 [tokens, len(layer_ids), hidden] are a server's states of the same tokens, named by vLLM's ids;
    where `final` is among them and the head can be read, the state after the final norm is a candidate too.
    """
    named = [(layer, BEFORE) for layer in layer_ids]
    candidates = [reference[:, i] for i in range(len(layer_ids))]
    if final in layer_ids and head is not None:
        named.append((final, AFTER))
        candidates.append(head.normed(reference[:, list(layer_ids).index(final)]))
    found = []
    for position in range(states.shape[1]):
        distances = [_distance(states[:, position], candidate) for candidate in candidates]
        order = sorted(range(len(distances)), key=lambda i: distances[i])
        second = distances[order[1]] if len(order) > 1 else float("inf")
        found.append(Match(*named[order[0]], distances[order[0]], second))
    return found


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(relative_rows(ours, theirs).median())


def agreed(where: str, matches: Sequence[Sequence[Match]], layer_ids: Sequence[int]) -> list[Match]:
    """The matches of several samples (the first axis) as one a position; raises InputError when they do not agree."""
    result = []
    for position, column in enumerate(zip(*matches, strict=True)):
        names = {(one.layer_id, one.final_state) for one in column}
        worst = max(column, key=lambda one: one.distance)
        if len(names) > 1 or not all(one.sure for one in column):
            raise InputError(
                f"{where}: position {position} is none of the states {list(layer_ids)} that the server has for the "
                "same "
                f"tokens: the nearest is id {worst.layer_id} at {worst.distance:.1%}, the same state is within "
                f"{NEAR:.0%}; "
                "another verifier, another prompt format or damaged states"
            )
        result.append(worst)
    return result
