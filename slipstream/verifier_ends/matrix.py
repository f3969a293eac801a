"""A weight [rows, columns] of a checkpoint, read in part and in float32 whatever its form.

Forms, by the tensors that stand for the weight:

* `weight` in float32, float16 or bfloat16;
* `weight` in float8 or int8 with `weight_scale` or `weight_scale_inv`: one for the tensor, one a row, one a row and
  group of columns, or one a block (128 x 128 in DeepSeek's FP8);
* compressed-tensors' pack-quantized: `weight_packed` int32, whose lowest bits are the first of 8 (INT4) or 4 (INT8)
  columns, offset by half the range, with `weight_scale`, `weight_shape`, for asymmetric ones `weight_zero_point`
  (packed likewise along the rows) and, where activations were ordered, `weight_g_idx`, the group of each column
  (compressed_tensors/compressors/pack_quantized).

Everything else is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.verifier_ends import scales
from slipstream.verifier_ends.files import Unreadable
from slipstream.verifier_ends.scales import Scales
from slipstream.verifier_ends.stored import FLOATS, Stored, unpacked

BLOCK_ROWS = 8192  # of a head, in float32 at once: 235 MB at width 7168
SCALED = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
# What a part's name says about a form that is not read here.
FOREIGN = {
    "qweight": "gptq or awq",
    "qzeros": "gptq or awq",
    "scales": "gptq or awq",
    "SCB": "bitsandbytes int8",
    "weight.absmax": "bitsandbytes 4-bit",
    "weight.quant_map": "bitsandbytes 4-bit",
    "weight_global_scale": "nvfp4",
    "weight_scale_2": "nvfp4",
    "weight_blocks": "mxfp4",
    "weight_scales": "mxfp4",
}
METHODS = frozenset({"gptq", "awq"})  # whose tensors are named alike


@dataclass(frozen=True)
class Matrix:
    """A weight of `shape` [rows, columns] that is `stored` in this form; `bits` are those of a packed one."""

    stored: Stored
    shape: tuple[int, int]
    bits: int | None = None
    scales: Scales | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The tensor's name in the checkpoint."""
        return self.stored.name

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` … `stop - 1` in float32; raises Unreadable when one is not finite."""
        values = self.stored.rows(start, stop)
        if self.bits:
            values = unpacked(values, self.bits)[:, : self.shape[1]]
        values = values.float()
        if self.scales is not None:
            values = self.scales.applied(values, start)
        if not bool(values.isfinite().all()):
            row = start + int((~values.isfinite()).any(-1).nonzero()[0])
            raise Unreadable(f"row {row} of {self.name} in {self.stored.path.name} is not finite; fetch the file again")
        return values

    def blocks(self, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The first `rows` rows as (first row, float32 [at most BLOCK_ROWS, columns])."""
        for start in range(0, rows, BLOCK_ROWS):
            yield start, self.rows(start, min(start + BLOCK_ROWS, rows))

    def take(self, rows: Sequence[int]) -> torch.Tensor:
        """The rows of these numbers, float32 [len(rows), columns]."""
        held = {row: self.rows(row, row + 1) for row in set(rows)}
        return torch.cat([held[row] for row in rows])


def read_matrix(files: Mapping[str, Path], parts: Mapping[str, str], quantization: Mapping[str, Any]) -> Matrix:
    """The weight of a module with the tensors `parts` (`names.parts`).

    `quantization` is config.json's `quantization_config`.  Raises Unreadable naming the form that is not read, or the
    sizes that do not fit.
    """
    module = min(parts.values(), key=len).rpartition(".")[0]
    method = str(quantization.get("quant_method") or "an unknown form")
    if "bias" in parts:
        raise Unreadable(f"{module} has a bias, which EAGLE-3 drafters do not know")
    if foreign := next((part for part in parts if part in FOREIGN), None):
        raise _refused(module, method if method in METHODS else FOREIGN[foreign], parts[foreign])
    stored = Stored.of(files, parts.get("weight") or parts.get("weight_packed") or min(parts.values()))
    if "weight" not in parts and stored.dtype != "I32":
        raise _refused(module, "nvfp4 or mxfp4" if stored.dtype == "U8" else method, f"{stored.name}, {stored.dtype}")
    scaled = any(name in parts for name in scales.NAMES)
    if "weight" in parts:
        if stored.dtype not in (SCALED if scaled else FLOATS | SCALED) or len(stored.shape) != 2:
            raise _refused(module, method, f"{stored.name}, {stored.dtype} {list(stored.shape)}")
        shape, bits = (stored.shape[0], stored.shape[1]), None
    else:
        shape, bits = _packed_shape(files, parts, stored, module, quantization)
    if not scaled and stored.dtype not in FLOATS:
        raise Unreadable(f"{module} is quantised ({stored.name} is {stored.dtype}) and has no weight_scale")
    made = scales.read_scales(files, parts, stored, shape, bits, quantization) if scaled else None
    return Matrix(stored, shape, bits, made)


def _refused(module: str, form: str, tensor: str) -> Unreadable:
    return Unreadable(
        f"{module} is quantised as {form} ({tensor}), which is not read here; use a checkpoint that has it in "
        "bfloat16, FP8 or compressed-tensors INT4 or INT8"
    )


def _packed_shape(
    files: Mapping[str, Path], parts: Mapping[str, str], stored: Stored, module: str, quantization: Mapping[str, Any]
) -> tuple[tuple[int, int], int]:
    """Shape of a packed weight, and the bits of one value."""
    if "weight_shape" not in parts:
        raise Unreadable(f"{module} is packed ({stored.name}) and has no weight_shape")
    rows, columns = (int(size) for size in Stored.of(files, parts["weight_shape"]).whole())
    named = {scheme["num_bits"] for scheme in scales.weight_schemes(quantization) if "num_bits" in scheme}
    fitting = [bits for bits in (4, 8) if stored.shape == (rows, -(-columns * bits // 32))]
    fitting = [bits for bits in fitting if not named or bits in named]
    if len(fitting) != 1:
        said = f"; config.json says {', '.join(map(str, sorted(named)))} bits" if named else ""
        raise Unreadable(
            f"{stored.name} of {list(stored.shape)} int32 holds [{rows}, {columns}] in neither 4 nor 8 bits{said}"
        )
    return (rows, columns), fitting[0]
