"""The two maps between draft and target ids, and which tokens a draft vocabulary takes.

`t2d.npy`: bool[target vocabulary], exactly N true.  `d2t.npy`: int64[N], OFFSETS: target id = i + d2t[i],
draft ids in ascending order of target ids.  Format: EAGLE-3 checkpoints as vLLM and speculators read them.

The N most frequent supervised tokens of the training rows, with every control token forced in: a drafter
that cannot say `</think>` or the end token fails exactly where a trace turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from slipstream.errors import Damaged, InputError


def ranking(counts: np.ndarray, forced: Iterable[int]) -> np.ndarray:
    """Every target id once, int64[target vocabulary], in the order in which draft vocabularies take them.

    `counts`: int64[target vocabulary], how often each token is supervised.  The `forced` ids first, then the most
    frequent, ties and unseen tokens by ascending id: a smaller vocabulary is a part of every larger one.  Raises
    InputError for a forced id that the verifier does not have.
    """
    keep = np.unique(np.fromiter(forced, dtype=np.int64))
    if len(keep) and (keep[0] < 0 or keep[-1] >= len(counts)):
        raise InputError(f"vocabulary.must_keep: ids must lie in 0 … {len(counts) - 1}, got {keep[0]} … {keep[-1]}")
    rank = np.array(counts, dtype=np.int64)
    rank[keep] = np.iinfo(np.int64).max
    return np.argsort(-rank, kind="stable")


def choose(counts: np.ndarray, size: int, forced: Iterable[int]) -> np.ndarray:
    """Target ids of the draft vocabulary, int64[size], ascending: the first of `ranking`.

    Raises InputError when `size` is too large or too small for `forced`.
    """
    keep = {*forced}
    if size > len(counts):
        raise InputError(f"vocabulary.size: {size} draft tokens are more than the verifier's {len(counts)}")
    order = ranking(counts, keep)
    if len(keep) > size:
        raise InputError(f"vocabulary.size: {size} is smaller than the {len(keep)} control tokens that must be in")
    return np.sort(order[:size])


def mappings(selected: np.ndarray, target_size: int) -> tuple[np.ndarray, np.ndarray]:
    """`(t2d, d2t)` for ascending target ids `selected`: bool[target_size] and int64[N] offsets."""
    t2d = np.zeros(target_size, dtype=np.bool_)
    t2d[selected] = True
    return t2d, selected - np.arange(len(selected), dtype=np.int64)


def check(t2d: np.ndarray, d2t: np.ndarray) -> None:
    """Raises Damaged when the pair breaks an invariant, as absolute ids in d2t do."""
    if t2d.dtype != np.bool_ or t2d.ndim != 1:
        raise Damaged(f"t2d must be bool[target vocabulary], got {t2d.dtype}{list(t2d.shape)}")
    if d2t.dtype != np.int64 or d2t.ndim != 1:
        raise Damaged(f"d2t must be int64[draft vocabulary], got {d2t.dtype}{list(d2t.shape)}")
    if int(t2d.sum()) != len(d2t):
        raise Damaged(f"t2d marks {int(t2d.sum())} tokens but d2t has {len(d2t)} entries")
    meant, marked = np.arange(len(d2t)) + d2t, np.flatnonzero(t2d)
    if len(wrong := np.flatnonzero(meant != marked)):
        first = int(wrong[0])
        raise Damaged(
            f"d2t disagrees with t2d: d2t[{first}] is {d2t[first]}, which makes draft id {first} token {meant[first]} "
            f"of {len(t2d)}, and t2d has token {marked[first]} there; an entry must be the OFFSET (target id - draft "
            "id), not the target id"
        )


def load(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The checked pair `(t2d, d2t)` in a vocabulary folder."""
    t2d = np.load(folder / "t2d.npy", allow_pickle=False)
    d2t = np.load(folder / "d2t.npy", allow_pickle=False)
    check(t2d, d2t)
    return t2d, d2t
