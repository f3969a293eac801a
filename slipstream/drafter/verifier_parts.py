"""The verifier's parts of a drafter: embedding, the head's rows under `t2d`, and what makes logits of a final state.

speculators loads them by the shortest tensor name that ends alike, unquantised only, and norms with the drafter's
epsilon and without the one that Gemma adds: a wrong tensor trains without an error.  Here they come from
`verifier_ends`, in blocks of rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.errors import InputError
from slipstream.features.recipe import POST_NORM
from slipstream.verifier_ends import Head, Matrix, Unreadable, capped, read_embedding, read_head


class AlreadyNormed(torch.nn.Module):
    """Stands for the verifier's final norm where states have passed it; keeps the weight that speculators knows."""

    def __init__(self, norm: Any, multiplier: float) -> None:
        super().__init__()
        self.weight = norm.weight
        self.multiplier = multiplier

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """The states as they are, but for the family's multiplier of logits."""
        return states if self.multiplier == 1 else states * self.multiplier


class CappedHead(torch.nn.Linear):
    """The verifier's head in a family that caps its logits (Gemma 2)."""

    def __init__(self, head: torch.nn.Linear, cap: float) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight = head.weight
        self.cap = cap

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits within -cap … cap."""
        return capped(super().forward(states), self.cap)


def check(folder: Path) -> None:
    """Reads headers and the norm only; raises InputError when the parts of the verifier in `folder` cannot be had."""
    _read(folder)


def load(model: Any, folder: Path, final_state: str) -> None:
    """Puts the parts of the verifier in `folder` into a speculators `Eagle3DraftModel` whose `t2d` is set.

    `final_state` is what the store says of its last state: the norm is applied to it exactly once.  Whether a
    parameter is trained stays as it is.  A model on the meta device is left alone.
    Raises InputError: a part that is missing, unclear, of another size or quantised in a form that is not read.
    """
    if model.embed_tokens.weight.is_meta:
        return
    head, embedding = _read(folder)
    wanted, found = tuple(model.embed_tokens.weight.shape), (head.vocabulary, embedding.shape[1])
    if wanted != found:
        raise InputError(
            f"{folder}: the verifier has {found[0]} tokens of width {found[1]}, the drafter {wanted[0]} of {wanted[1]}"
        )
    try:
        with torch.no_grad():
            _copy(model, head, embedding)
    except Unreadable as reason:
        raise InputError(f"{folder}: {reason}") from reason
    if final_state == POST_NORM:
        model.verifier_norm = AlreadyNormed(model.verifier_norm, head.multiplier)
    else:
        model.verifier_norm.variance_epsilon = head.eps
    if head.cap is not None:
        model.verifier_lm_head = CappedHead(model.verifier_lm_head, head.cap)


def _read(folder: Path) -> tuple[Head, Matrix]:
    try:
        return read_head(folder), read_embedding(folder)
    except Unreadable as reason:
        raise InputError(f"{folder}: {reason}") from reason


def _copy(model: Any, head: Head, embedding: Matrix) -> None:
    for start, rows in embedding.blocks(head.vocabulary):
        model.embed_tokens.weight[start : start + len(rows)] = rows
    filled = 0
    for start, rows in head.matrix.blocks(head.vocabulary):
        kept = rows if model.t2d is None else rows[model.t2d[start : start + len(rows)]]
        for taker in (model.lm_head, model.verifier_lm_head):
            taker.weight[filled : filled + len(kept)] = kept
        filled += len(kept)
    # states that passed the norm have no weight to multiply: AlreadyNormed has the multiplier then
    model.verifier_norm.weight.copy_(head.gain * head.multiplier)
