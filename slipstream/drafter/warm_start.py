"""Starting from another drafter: every tensor accounted for, the head's rows moved with their tokens.

`fc`, the decoder layer and the norms are taken as they are.  A head row means a token, and which token row i means is
the mapping's to say: under another mapping the same rows at the same places would mean other tokens, which trains on
without an error and cannot recover while the head is frozen.  So each token of this run that the checkpoint has brings
its own row along, and new ones take the verifier's.  That holds whether the head is trained here or not
(`drafter.train_lm_head`): `fc` and the layer were trained against the checkpoint's head.  Where that head was frozen to
the verifier's rows (speculators 0.9), they are the same rows.  Embedding, final norm and the loss's head are the
verifier's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from slipstream import atomic
from slipstream.drafter.warm_start_check import HEAD
from slipstream.drafter.warm_start_source import Checkpoint
from slipstream.errors import InputError

FILE = "warm_start.json"
MAPS = ("t2d", "d2t")
VERIFIERS = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True)
class Fate:
    """What became of one tensor, the drafter's or the checkpoint's."""

    tensor: str
    shape: list[int]
    fate: Literal["taken", "remapped", "fresh", "verifier's", "left out"]
    detail: str = ""


def apply(model: Any, checkpoint: Checkpoint, t2d: np.ndarray) -> list[Fate]:
    """Copies a checked checkpoint (`warm_start_check`) into `model`, whose verifier's parts are loaded already.

    `t2d`: this run's, bool[target vocabulary].  Returns a row for every tensor of the drafter, then one for each of the
    checkpoint's that it has no use for.  Raises InputError for a tensor with NaN or infinity.
    """
    state = model.state_dict()
    fates = []
    for name in state.keys() - {HEAD, *MAPS, *VERIFIERS}:
        state[name].copy_(_finite(checkpoint, name))
        fates.append(Fate(name, list(state[name].shape), "taken"))
    fates.append(_head(state[HEAD], checkpoint, t2d))
    same = checkpoint.maps is not None and np.array_equal(checkpoint.maps[0], t2d)
    for name in state.keys() & {*MAPS}:
        given = f"; the checkpoint's own {len(checkpoint.maps[1])} tokens left out" if checkpoint.maps else ""
        said = Fate(name, list(state[name].shape), "taken", "the same mapping")
        fates.append(said if same else Fate(said.tensor, said.shape, "fresh", f"this run's vocabulary{given}"))
    for name in state.keys() & {*VERIFIERS}:
        given = "the checkpoint's own left out" if name in checkpoint.tensors else ""
        fates.append(Fate(name, list(state[name].shape), "verifier's", given))
    left = checkpoint.tensors.keys() - state.keys()
    unused = [Fate(name, list(checkpoint.tensors[name].shape), "left out") for name in left]
    if checkpoint.says.layer_ids is None:
        unused.append(Fate("config.json", [], "left out", "names no auxiliary layers: taken on trust"))
    return sorted(fates, key=lambda fate: fate.tensor) + sorted(unused, key=lambda fate: fate.tensor)


def _finite(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    tensor = checkpoint.tensors[name].load()
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"{checkpoint.tensors[name].file}: {checkpoint.tensors[name].name} holds NaN or infinity")
    return tensor


def rows(t2d: np.ndarray, of: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """`(here, there)`: rows of this run's head and of another mapping's for the tokens that both have.

    `t2d` is this run's, `of` the other's (None: all tokens), both bool[target vocabulary]; int64[shared] each.
    """
    tokens = np.flatnonzero(t2d)
    if of is None:
        return np.arange(len(tokens)), tokens
    place = np.cumsum(of) - 1
    here = np.flatnonzero(of[tokens])
    return here, place[tokens[here]]


def _head(head: torch.Tensor, checkpoint: Checkpoint, t2d: np.ndarray) -> Fate:
    """Moves the rows; `head` holds the verifier's."""
    shape = list(head.shape)
    if HEAD not in checkpoint.tensors:
        return Fate(HEAD, shape, "verifier's", "the checkpoint has none")
    given = _finite(checkpoint, HEAD)
    here, there = (torch.from_numpy(part) for part in rows(t2d, checkpoint.maps and checkpoint.maps[0]))
    moved = given[there].to(head.dtype)
    differ = int((moved != head[here].to(given.dtype).to(head.dtype)).any(1).sum())
    head[here] = moved
    of_own = f"{len(here):,} of {len(head):,} rows by token id, {differ:,} unlike the verifier's"
    if len(here) == 0:
        return Fate(HEAD, shape, "verifier's", "no token in common with the checkpoint")
    if len(here) == len(head) == len(given):
        return Fate(HEAD, shape, "taken", of_own)
    return Fate(HEAD, shape, "remapped", f"{of_own}; {len(head) - len(here):,} new tokens have the verifier's")


def table(fates: Iterable[Fate]) -> list[dict[str, str]]:
    """The rows as text, for a file and a page."""
    return [{**asdict(fate), "shape": " x ".join(map(str, fate.shape))} for fate in fates]


def record(fates: list[Fate], folder: Path) -> None:
    """Writes the table to `folder` and to this process's output (the training log)."""
    atomic.write_json(folder / FILE, table(fates))
    for row in table(fates):
        print(f"warm start: {row['tensor']} [{row['shape']}] {row['fate']} {row['detail']}".rstrip(), flush=True)
