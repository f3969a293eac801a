"""The draft vocabulary: which target tokens the drafter may propose, and the two maps between the ids.

`t2d.npy`: bool[target vocabulary], exactly N true.  `d2t.npy`: int64[N], OFFSETS: target id = i + d2t[i],
draft ids in ascending order of target ids.  Format: EAGLE-3 checkpoints as vLLM and speculators read them.

The N most frequent supervised tokens of the training rows, with every control token forced in: a drafter
that cannot say `</think>` or the end token fails exactly where a trace turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import atomic, verifier
from slipstream.artifact import Artifact, checksum, claim, stage_key
from slipstream.config import RunConfig
from slipstream.digest import digest
from slipstream.errors import Damaged, InputError
from slipstream.traces import splits
from slipstream.traces import table as traces_table

STAGE, VERSION = "vocabulary", 1


def choose(counts: np.ndarray, size: int, forced: Iterable[int]) -> np.ndarray:
    """Target ids of the draft vocabulary, int64[size], ascending.

    `counts`: int64[target vocabulary], how often each token is supervised.  Most frequent first, ties and
    unseen tokens by ascending id.  Raises InputError when `size` is too large or too small for `forced`.
    """
    keep = np.unique(np.fromiter(forced, dtype=np.int64))
    if size > len(counts):
        raise InputError(f"vocabulary.size: {size} draft tokens are more than the verifier's {len(counts)}")
    if len(keep) and (keep[0] < 0 or keep[-1] >= len(counts)):
        raise InputError(f"vocabulary.must_keep: ids must lie in 0 … {len(counts) - 1}, got {keep[0]} … {keep[-1]}")
    if len(keep) > size:
        raise InputError(f"vocabulary.size: {size} is smaller than the {len(keep)} control tokens that must be in")
    rank = np.asarray(counts, dtype=np.int64).copy()
    rank[keep] = np.iinfo(np.int64).max
    by_frequency = np.argsort(-rank.astype(np.float64), kind="stable")
    return np.sort(by_frequency[:size]).astype(np.int64)


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
    if not np.array_equal(np.arange(len(d2t)) + d2t, np.flatnonzero(t2d)):
        raise Damaged("d2t disagrees with t2d: entry i must be the OFFSET (target id - i), not the target id")


def load(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The checked pair `(t2d, d2t)` in a vocabulary folder."""
    t2d = np.load(folder / "t2d.npy", allow_pickle=False)
    d2t = np.load(folder / "d2t.npy", allow_pickle=False)
    check(t2d, d2t)
    return t2d, d2t


def supervised_counts(rows: Iterable[Mapping[str, Any]], target_size: int) -> dict[str, np.ndarray]:
    """int64[target_size] by split: how often each token stands under the loss mask."""
    counts = {split: np.zeros(target_size, dtype=np.int64) for split in (splits.TRAIN, splits.VALIDATION)}
    for row in rows:
        tokens = np.asarray(row["input_ids"], dtype=np.int64)[np.asarray(row["loss_mask"], dtype=np.bool_)]
        counts[row["split"]] += np.bincount(tokens, minlength=target_size)
    return counts


def coverage(counts: np.ndarray, t2d: np.ndarray) -> float:
    """Share of the counted tokens that are in the draft vocabulary; 0 when nothing was counted."""
    total = int(counts.sum())
    return float(counts[t2d].sum() / total) if total else 0.0


def _recipe(config: RunConfig) -> dict[str, Any]:
    shape = verifier.load_shape(config.verifier)
    special = verifier.special_tokens(verifier.folder_of(config.verifier))
    forced = sorted({*special.values(), *shape.eos_token_ids, *config.vocabulary.must_keep})
    return {"size": config.vocabulary.size, "forced": forced, "target_size": shape.vocab_size}


def key(config: RunConfig, traces: Artifact) -> str:
    """The folder key for these traces."""
    return stage_key(STAGE, VERSION, _recipe(config), {"traces": traces.content})


def run(workdir: Path, config: RunConfig, traces: Artifact, on_wait: Callable[[str], None] | None = None) -> Artifact:
    """Counts the supervised tokens and writes the maps."""
    recipe, inputs = _recipe(config), {"traces": traces.content}
    name = stage_key(STAGE, VERSION, recipe, inputs)
    with claim(workdir, STAGE, name, on_wait) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        rows = traces_table.read(traces, ["split", "input_ids", "loss_mask"])
        counts = supervised_counts(rows, recipe["target_size"])
        selected = choose(counts[splits.TRAIN], recipe["size"], recipe["forced"])
        t2d, d2t = mappings(selected, recipe["target_size"])
        check(t2d, d2t)
        for file, array in (("t2d.npy", t2d), ("d2t.npy", d2t)):
            with atomic.replacing(folder.path / file) as temporary, temporary.open("wb") as out:
                np.save(out, array, allow_pickle=False)
        return folder.commit(
            version=VERSION,
            recipe=recipe,
            inputs=inputs,
            content=digest([checksum(folder.path / "t2d.npy"), checksum(folder.path / "d2t.npy")]),
            files=["t2d.npy", "d2t.npy"],
            counts={
                "size": len(d2t),
                "target_size": len(t2d),
                "forced": len(recipe["forced"]),
                "unseen": int((counts[splits.TRAIN][selected] == 0).sum()),
                "coverage_train": round(coverage(counts[splits.TRAIN], t2d), 6),
                "coverage_validation": round(coverage(counts[splits.VALIDATION], t2d), 6),
            },
        )
