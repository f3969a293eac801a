"""One captured sample: the file format, and what makes a sample unusable.

A safetensors file as vLLM's connector writes it and speculators reads it: `hidden_states`
[tokens, layer ids, hidden size] in the served type, `token_ids` int64 [tokens].  The last layer id is the
final state, before the final norm.

In the fp8 form (hs-connectors) `hidden_states` are float8_e4m3fn and `hidden_states_scales` float32 [tokens, 1, 1]
hold one factor a token: state = code * scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from slipstream.artifact import FileRecord
from slipstream.features.layout import Tensor, tensors

FP8 = "float8_e4m3fn"
SCALES = "hidden_states_scales"
PIECE_BYTES = 1 << 20  # stays in the core's cache


class BadSample(ValueError):
    """Why a captured sample may not be stored."""


@dataclass(frozen=True)
class Form:
    """What every sample of a recipe looks like: [tokens, layers, hidden] in `dtype` (a torch name)."""

    layers: int
    hidden: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes of states that one token takes; an fp8 token has its scale besides."""
        width = 1 if self.dtype == FP8 else getattr(torch, self.dtype).itemsize
        return self.layers * self.hidden * width + (4 if self.dtype == FP8 else 0)


@dataclass(frozen=True)
class SampleInfo:
    """What the index keeps of a sample: its file, its length, the range of its values."""

    file: FileRecord
    tokens: int
    minimum: float
    maximum: float


@dataclass(frozen=True)
class _Codes:
    """A float type as bit patterns: sign and magnitude, so that patterns of one sign are in the values' order."""

    safetensors: str
    unsigned: type
    signed: type
    not_finite: int  # the smallest magnitude that is infinity or NaN


CODES = {
    "float32": _Codes("F32", np.uint32, np.int32, 0x7F800000),
    "bfloat16": _Codes("BF16", np.uint16, np.int16, 0x7F80),
    "float16": _Codes("F16", np.uint16, np.int16, 0x7C00),
    FP8: _Codes("F8_E4M3", np.uint8, np.int8, 0x7F),  # no infinity
}


def check(data: Any, token_ids: Sequence[int], form: Form) -> tuple[float, float]:
    """Smallest and largest value of the sample in `data` (any buffer).

    Raises BadSample: not safetensors, other tokens than `token_ids`, another shape or type than `form`'s, NaN or
    infinity (names the layer), rows of zeros.
    """
    held = _parts(data, token_ids, form)
    return _range(held, form)


def examine(data: Any, token_ids: Sequence[int], form: Form) -> SampleInfo:
    """`check`, and size and XXH3-128 of the whole file, in one pass over the memory.

    Every piece is hashed and searched while it is in the core's cache: twice as fast as one after the other.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    held = _parts(raw, token_ids, form)
    states = held["hidden_states"]
    hasher = xxhash.xxh3_128(raw[: states.start].data)
    span = _range(held, form, hasher.update)
    hasher.update(raw[states.start + len(states.data) :].data)
    return SampleInfo(FileRecord(size=len(raw), checksum=hasher.hexdigest()), len(token_ids), *span)


def states_of(data: Any, form: Form) -> torch.Tensor:
    """The states in `data`, float32 [tokens, layers, hidden]; fp8 codes are multiplied by their scales."""
    held = tensors(data)
    states = held["hidden_states"]
    values = torch.from_numpy(states.data.copy()).view(getattr(torch, form.dtype)).reshape(states.shape).float()
    if form.dtype == FP8:
        values *= torch.from_numpy(held[SCALES].data.copy()).view(torch.float32).reshape(-1, 1, 1)
    return values


def _parts(data: Any, token_ids: Sequence[int], form: Form) -> dict[str, Tensor]:
    try:
        held = tensors(data)
        states, tokens = held["hidden_states"], held["token_ids"]
        same = np.array_equal(tokens.data.view(np.int64), np.asarray(token_ids, dtype=np.int64))
    except Exception as error:
        raise BadSample(f"not a hidden-state file ({type(error).__name__}: {error})") from error
    if not same:
        raise BadSample(f"holds {len(tokens.data) // 8} other tokens than the {len(token_ids)} asked for")
    expected = (len(token_ids), form.layers, form.hidden)
    if states.shape != expected:
        raise BadSample(f"shape {list(states.shape)} instead of {list(expected)}")
    if states.dtype != CODES[form.dtype].safetensors:
        found = next((name for name, kind in CODES.items() if kind.safetensors == states.dtype), states.dtype)
        raise BadSample(f"type {found} instead of {form.dtype}")
    return held


def _scales(held: dict[str, Tensor], tokens: int) -> np.ndarray:
    entry = held.get(SCALES)
    if entry is None or entry.dtype != "F32" or entry.shape != (tokens, 1, 1):
        raise BadSample(f"no {SCALES} of shape {[tokens, 1, 1]}, so the float8 codes mean nothing")
    scales: np.ndarray = entry.data.view(np.float32)
    if not (np.isfinite(scales).all() and (scales > 0).all()):
        raise BadSample(f"NaN, infinity or nothing as the scale of token {int(np.argmin(np.isfinite(scales)))}")
    return scales


def _range(
    held: dict[str, Tensor], form: Form, seen: Callable[[memoryview], None] = lambda piece: None
) -> tuple[float, float]:
    """Smallest and largest value; `seen` gets the states' rows piece by piece, in order.

    Two maxima of the bit patterns say everything: SIMD, about 10 GB/s each, where isfinite and aminmax together reach
    0.2.
    """
    kind, states = CODES[form.dtype], held["hidden_states"]
    scales = _scales(held, states.shape[0]) if form.dtype == FP8 else None
    rows: np.ndarray = states.data.view(kind.unsigned).reshape(-1, form.hidden)
    sign = 1 << (8 * np.dtype(kind.unsigned).itemsize - 1)
    highest: np.ndarray = np.empty(len(rows), kind.unsigned)
    raised: np.ndarray = np.empty(len(rows), kind.signed)
    step = max(1, PIECE_BYTES // max(1, rows[:1].nbytes))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        seen(piece.data)
        piece.max(axis=1, out=highest[start : start + step])
        piece.view(kind.signed).max(axis=1, out=raised[start : start + step])
    highest, raised = highest.astype(np.int64), raised.astype(np.int64)
    below = np.where(highest >= sign, highest - sign, -1)  # magnitude of the lowest negative value, -1 for none
    above = np.where(raised >= 0, raised, -1)  # magnitude of the highest positive value, -1 for none
    magnitude = np.maximum(below, above)
    for wrong, what in ((magnitude >= kind.not_finite, "NaN or infinity"), (magnitude == 0, "only zeros")):
        if wrong.any():
            token, layer = divmod(int(np.argmax(wrong)), form.layers)
            raise BadSample(f"{what} at token {token}, layer position {layer} ({int(wrong.sum())} such rows)")
    lowest, top = -_values(below, form), _values(above, form)
    if (one_sign := (below < 0) | (above < 0)).any():
        nearest = rows[one_sign].min(axis=1).astype(np.int64)  # the value of such a row that is nearest to zero
        ends = np.where(nearest >= sign, -_values(nearest - sign, form), _values(nearest, form))
        lowest[one_sign] = np.where(below[one_sign] < 0, ends, lowest[one_sign])
        top[one_sign] = np.where(above[one_sign] < 0, ends, top[one_sign])
    if scales is not None:
        factors = np.repeat(scales, form.layers)
        lowest, top = lowest * factors, top * factors
    return float(lowest.min()), float(top.max())


def _values(magnitudes: np.ndarray, form: Form) -> np.ndarray:
    """float32 values of sign-free bit patterns; negative ones (no such value) give anything."""
    codes: np.ndarray = np.where(magnitudes < 0, 0, magnitudes).astype(CODES[form.dtype].unsigned)
    return torch.from_numpy(codes.view(np.uint8)).view(getattr(torch, form.dtype)).float().numpy()
