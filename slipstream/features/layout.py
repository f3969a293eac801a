"""The safetensors container of a sample, read from bytes that are already in memory; nothing is copied.

Format: 8 bytes little-endian header length, a JSON header of {name: dtype, shape, data_offsets}, then the tensors
(https://github.com/huggingface/safetensors#format).  `safetensors.torch.load` copies every tensor, which would cost a
capture more than its checksum does.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

HEADER_LIMIT = 100_000_000  # safetensors' own
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: safetensors' type name, its shape, its bytes (uint8, a view), where they start."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    start: int


def tensors(data: Any) -> dict[str, Tensor]:
    """The tensors in `data` (any buffer); raises ValueError unless they cover it exactly, without gap or overlap."""
    raw = np.frombuffer(data, dtype=np.uint8)
    if len(raw) < 8:
        raise ValueError(f"{len(raw)} bytes are no safetensors file")
    length = int.from_bytes(raw[:8].tobytes(), "little")
    if length > min(HEADER_LIMIT, len(raw) - 8):
        raise ValueError(f"a header of {length} bytes in a file of {len(raw)}")
    header = json.loads(raw[8 : 8 + length].tobytes())
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    offset = 8 + length
    body = raw[offset:]
    found = {name: _tensor(name, entry, body, offset) for name, entry in header.items() if name != "__metadata__"}
    if sum(len(tensor.data) for tensor in found.values()) != len(body):
        raise ValueError("truncated or overlong: the tensors do not fill the file")
    return found


def _tensor(name: str, entry: Any, body: np.ndarray, offset: int) -> Tensor:
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in WIDTHS:
        raise ValueError(f"{name} has type {dtype}")
    if not 0 <= start <= stop <= len(body) or stop - start != WIDTHS[dtype] * math.prod(shape):
        raise ValueError(f"truncated or inconsistent: {name} of shape {list(shape)} at bytes {start} to {stop}")
    return Tensor(dtype, shape, body[start:stop], offset + start)
