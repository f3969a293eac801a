"""How far states are from states, and whose tokens they follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

PAIRED_TOKENS = 1024  # of one sequence, for the pairs of `affinity`


def relative(states: torch.Tensor, reference: torch.Tensor) -> float:
    """||states - reference|| / ||reference|| of [tokens, hidden], token by token, as the root of their mean square.

    Not of the whole matrix: in most models the first token's state is hundreds of times as large as the others' and
    the same in every sequence, so that states of another sequence would be near.
    """
    return float(relative_rows(states, reference).pow(2).mean().sqrt())


def relative_rows(states: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """||states - reference|| / ||reference|| of each token: the last axis is taken away."""
    return (states - reference).norm(dim=-1) / reference.norm(dim=-1)


def affinity(states: torch.Tensor, token_ids: Sequence[int]) -> float | None:
    """How much more alike states [tokens, hidden] are where the token is the same than where it is not.

    Mean cosine of centred states over pairs of positions with equal tokens, minus that over the other pairs: a
    verifier's residual stream carries its token's embedding, whatever its weights, so that states of this sequence
    score clearly above 0 and states of other tokens about 0.  None without a repeated token.
    """
    tokens = torch.tensor(list(token_ids[:PAIRED_TOKENS]))
    centred = states[: len(tokens)] - states[: len(tokens)].mean(0)
    unit = torch.nn.functional.normalize(centred, dim=-1)
    cosines = unit @ unit.T
    same = tokens[:, None] == tokens[None, :]
    apart = ~torch.eye(len(tokens), dtype=torch.bool)
    if not (same & apart).any() or not (~same).any():
        return None
    return float(cosines[same & apart].mean() - cosines[~same].mean())
