"""The scales of a quantised weight: which of them belongs to which element."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.verifier_ends.files import Unreadable
from slipstream.verifier_ends.stored import FLOATS, Stored, unpacked

NAMES = ("weight_scale", "weight_scale_inv")  # DeepSeek's second name notwithstanding, both multiply
DEEPSEEK = (128, 128)  # rows and columns of a block, where config.json names none


@dataclass(frozen=True)
class Scales:
    """`values` and `zero` are float32, [] or [row blocks, column groups]; `block` is the rows and columns of one.

    With `groups`, int64 [columns], a column's group is named instead of counted.
    """

    values: torch.Tensor
    block: tuple[int, int]
    zero: torch.Tensor | None
    groups: torch.Tensor | None

    def applied(self, quantised: torch.Tensor, start: int) -> torch.Tensor:
        """(quantised - zero) * scale for float32 rows [n, columns] from row `start` on."""
        if self.zero is not None:
            quantised = quantised - self._spread(self.zero, start, quantised)
        return quantised * self._spread(self.values, start, quantised)

    def _spread(self, scales: torch.Tensor, start: int, over: torch.Tensor) -> torch.Tensor:
        if scales.ndim == 0:
            return scales
        if scales.shape[0] > 1:
            scales = scales[torch.arange(start, start + len(over)) // self.block[0]]
        if self.groups is not None:
            return scales[:, self.groups]
        return scales.repeat_interleave(self.block[1], 1)[:, : over.shape[1]]


def read_scales(
    files: Mapping[str, Path],
    parts: Mapping[str, str],
    weight: Stored,
    shape: tuple[int, int],
    bits: int | None,
    quantization: Mapping[str, Any],
) -> Scales:
    """The scales among a module's `parts` for a weight of `shape`; raises Unreadable when their sizes do not fit."""
    stored = next(Stored.of(files, parts[name]) for name in NAMES if name in parts)
    if stored.dtype not in FLOATS:
        raise Unreadable(f"{weight.name} has {stored.dtype} scales (a microscaling form), which are not read here")
    values = stored.whole().float()
    if values.numel() == 1:
        values = values.reshape(())
    elif values.shape == shape[:1]:
        values = values[:, None]
    block = _block(values, shape, quantization)
    if block is None:
        raise _unfitting(stored, weight, shape)
    zero = groups = None
    if "weight_zero_point" in parts:
        held = Stored.of(files, parts["weight_zero_point"])
        zero = held.whole()
        if bits and held.dtype == "I32":  # packed along the rows
            zero = unpacked(zero.T.contiguous(), bits).T[: shape[0]]
        if zero.numel() != values.numel():
            raise _unfitting(held, weight, shape)
        zero = zero.float().reshape(values.shape)
    if "weight_g_idx" in parts:
        held = Stored.of(files, parts["weight_g_idx"])
        groups = held.whole().long()
        if (
            groups.shape != shape[1:]
            or values.ndim != 2
            or not bool(((groups >= 0) & (groups < values.shape[1])).all())
        ):
            raise _unfitting(held, weight, shape)
    return Scales(values, block, zero, groups)


def _block(scales: torch.Tensor, shape: tuple[int, int], quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that one scale covers; None when no size fits.

    A size that config.json names comes first: with rows that are no multiple of it the shapes alone would lie.
    """
    if scales.ndim == 0:
        return shape
    if scales.ndim != 2:
        return None
    by_row = scales.shape[0] == shape[0]
    for high, wide in [*_named(quantization), *([] if by_row else [DEEPSEEK])]:
        if (-(-shape[0] // high), -(-shape[1] // wide)) == tuple(scales.shape):
            return high, wide
    if shape[0] % scales.shape[0] or shape[1] % scales.shape[1]:
        return None
    return shape[0] // scales.shape[0], shape[1] // scales.shape[1]


def _named(quantization: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Block sizes in a `quantization_config`: FP8's own, compressed-tensors' blocks and groups."""
    if block := quantization.get("weight_block_size"):
        yield block[0], block[1]
    for weights in weight_schemes(quantization):
        if block := weights.get("block_structure"):
            yield block[0], block[1]
        if (size := weights.get("group_size") or 0) > 0:
            yield 1, size


def weight_schemes(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How compressed-tensors' groups say that weights are quantised."""
    groups = quantization.get("config_groups") or {}
    return [group["weights"] for group in groups.values() if isinstance(group, Mapping) and group.get("weights")]


def _unfitting(stored: Stored, weight: Stored, shape: tuple[int, int]) -> Unreadable:
    return Unreadable(f"{stored.name} {list(stored.shape)} does not fit {weight.name} of {list(shape)}")
