"""What is refused before a server or a training process touches a GPU.

From the verifier's headers, the store's manifest and its masks.
"""

from __future__ import annotations

import numpy as np

from slipstream import verifier
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.drafter import verifier_parts
from slipstream.errors import InputError
from slipstream.traces import splits


def require_usable(config: RunConfig, features: Artifact) -> None:
    """Raises InputError when training cannot use this store, or could learn nothing from it."""
    verifier_parts.check(verifier.folder_of(config.verifier))
    _require_layers(config, features)
    _require_rows(config, features)
    _require_supervision(config, features)


def _require_rows(config: RunConfig, features: Artifact) -> None:
    """A row for each device in either split: with fewer, speculators' sampler gives an epoch without a step."""
    counts, devices = features.manifest().counts, len(config.drafter.devices)
    for split in (splits.TRAIN, splits.VALIDATION):
        if counts[split] < devices:
            raise InputError(
                f"{features.path}: {counts[split]} {split} rows for {devices} GPUs (drafter.devices), and each needs "
                "one at least; train on fewer or take more prompts"
            )


def _require_layers(config: RunConfig, features: Artifact) -> None:
    shape, made = verifier.load_shape(config.verifier), features.manifest().recipe
    wanted, held = verifier.capture_ids(config.features.layer_ids, shape), list(made["layer_ids"])
    if held != wanted:
        raise InputError(
            f"{features.path}: holds the states of layers {held}, the final one last, but features.layer_ids asks for "
            f"{wanted}; set features.layer_ids to {held[:-1]} or capture the features again"
        )
    if made["hidden_size"] != shape.hidden_size:
        raise InputError(
            f"{features.path}: holds states of width {made['hidden_size']}, but the verifier's is {shape.hidden_size}; "
            "take the features of this verifier"
        )


def _require_supervision(config: RunConfig, features: Artifact) -> None:
    """At least one token under the loss mask in either split, among those that a packed step keeps."""
    train = features.manifest().counts[splits.TRAIN]
    lengths, supervised = _supervised(features, config.drafter.sequence_length)
    for split, rows in ((splits.TRAIN, slice(0, train)), (splits.VALIDATION, slice(train, None))):
        whole, kept = (int(counts[rows].sum()) for counts in supervised)
        if kept:
            continue
        tokens = f"{lengths[rows].sum():,} tokens of the {len(lengths[rows]):,} {split} rows"
        if whole:
            raise InputError(
                f"{features.path}: 0 supervised tokens lie within drafter.sequence_length "
                f"({config.drafter.sequence_length}), {whole:,} beyond it, of the {tokens}; make it longer"
            )
        raise InputError(
            f"{features.path}: 0 of the {tokens} are supervised (loss_mask), so there is nothing to learn from; "
            "look at the traces' loss masks"
        )


def _supervised(features: Artifact, length: int) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """int64[rows] each: tokens, supervised tokens, and those of them that a batch of rows cut at `length` trains on.

    A batch shifts a row by one (speculators' `shift_batch`), so a row's first token is never a target and `length` + 1
    tokens of it fit.  The masks are 8 bytes a token, read once.
    """
    import datasets

    masks = datasets.load_from_disk(features.path).with_format("arrow")["loss_mask"]
    sizes, whole, kept = [], [], []
    for chunk in masks.chunks if hasattr(masks, "chunks") else [masks]:
        flat = chunk.flatten().to_numpy(zero_copy_only=False) != 0
        ends = np.asarray(chunk.value_lengths()).cumsum()
        starts = np.concatenate([[0], ends[:-1]])
        sums = np.concatenate([[0], flat.cumsum(dtype=np.int64)])
        sizes.append(ends - starts)
        whole.append(sums[ends] - sums[starts])
        kept.append(sums[np.minimum(ends, starts + length + 1)] - sums[np.minimum(ends, starts + 1)])
    return np.concatenate(sizes), (np.concatenate(whole), np.concatenate(kept))
