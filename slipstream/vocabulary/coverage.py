"""What a draft vocabulary covers: the share of supervised tokens that it can say, on either split, at any size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.traces import splits

CURVE = 80  # sizes in the drawn curve
SPLITS = (splits.TRAIN, splits.VALIDATION)


def supervised_counts(rows: Iterable[Mapping[str, Any]], target_size: int) -> dict[str, np.ndarray]:
    """int64[target_size] by split: how often each token stands under the loss mask."""
    counts = {split: np.zeros(target_size, dtype=np.int64) for split in SPLITS}
    for row in rows:
        tokens = np.asarray(row["input_ids"], dtype=np.int64)[np.asarray(row["loss_mask"], dtype=np.bool_)]
        counts[row["split"]] += np.bincount(tokens, minlength=target_size)
    return counts


def coverage(counts: np.ndarray, t2d: np.ndarray) -> float:
    """Share of the counted tokens that are in the draft vocabulary; 0 when nothing was counted."""
    total = int(counts.sum())
    return float(counts[t2d].sum() / total) if total else 0.0


def by_size(counts: np.ndarray, order: np.ndarray, sizes: Sequence[int]) -> list[float]:
    """Coverage by the first `size` tokens of `order` (`mapping.ranking`), for each of `sizes`."""
    total, said = int(counts.sum()), np.cumsum(counts[order])
    return [round(float(said[size - 1] / total), 6) if total else 0.0 for size in sizes]


def figures(
    counts: Mapping[str, np.ndarray], order: np.ndarray, t2d: np.ndarray, sweep: Iterable[int], least: int
) -> dict[str, Any]:
    """What `coverage.json` holds of the counts: the vocabulary `t2d` and, by size, the most frequent tokens.

    Sizes of the `sweep` below `least` (the tokens that must be in) or above the verifier's vocabulary do not exist and
    are left out; the vocabulary's own size is always among them.
    """
    size, target_size = int(t2d.sum()), len(t2d)
    sizes = sorted({each for each in sweep if least <= each <= target_size} | {size})
    steps = np.geomspace(max(1, least), target_size, CURVE).round().astype(np.int64)
    curve = sorted({*steps.tolist(), *sizes})
    return {
        "size": size,
        "target_size": target_size,
        "supervised_tokens": {split: int(counts[split].sum()) for split in SPLITS},
        "distinct_tokens": {split: int((counts[split] > 0).sum()) for split in SPLITS},
        "unseen": int((counts[splits.TRAIN][t2d] == 0).sum()),
        "coverage": {split: round(coverage(counts[split], t2d), 6) for split in SPLITS},
        "by_size": _columns(counts, order, sizes),
        "curve": _columns(counts, order, curve),
    }


def _columns(counts: Mapping[str, np.ndarray], order: np.ndarray, sizes: list[int]) -> dict[str, list[Any]]:
    return {"size": sizes, **{split: by_size(counts[split], order, sizes) for split in SPLITS}}
