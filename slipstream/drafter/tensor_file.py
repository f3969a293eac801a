"""Writing a safetensors file from tensors that lie on a device or in shards, without a second copy of them.

The library's `save_file` wants all tensors on the CPU at once: 20 GB for the weights and moments of a drafter of
Kimi-K2.5's width.  Here a piece at a time passes through the CPU, hashed on the way, so that the file's checksum costs
no second reading.  Format: https://github.com/huggingface/safetensors (8 bytes little-endian header length, a JSON
header of dtype, shape and data_offsets, then the bytes).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from slipstream.artifact import FileRecord

PIECE_BYTES = 1 << 26
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded over ranks (all of them must ask)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write(path: Path | None, tensors: Mapping[str, torch.Tensor]) -> FileRecord | None:
    """Writes the tensors in this order to `path` and the disk; returns the file's size and checksum.

    Every rank of a sharded training calls it with the same names; those without a path only take part in gathering.
    """
    if path is None:
        for tensor in tensors.values():
            gathered(tensor.detach())
        return None
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("wb", buffering=0) as file:

        def put(data: Any) -> None:
            nonlocal size
            view = memoryview(data).cast("B")
            hasher.update(view)
            size += len(view)
            while len(view):
                view = view[file.write(view) :]

        put(_header(tensors))
        for tensor in tensors.values():
            data = gathered(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
            for piece in data.split(PIECE_BYTES):
                if len(piece):
                    put(piece.cpu().numpy())
        os.fsync(file.fileno())
    return FileRecord(size=size, checksum=hasher.hexdigest())
