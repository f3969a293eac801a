"""One tensor of a checkpoint, read in part as it is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.verifier_ends.files import Unreadable

FLOATS = frozenset({"F32", "F16", "BF16", "F64"})


@dataclass(frozen=True)
class Stored:
    """One tensor in a safetensors file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(files: Mapping[str, Path], name: str) -> Stored:
        """The tensor's place and header; raises Unreadable."""
        with _opened(files[name], name) as part:
            return Stored(files[name], name, part.get_dtype(), tuple(part.get_shape()))

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` … `stop - 1` as they are stored; the whole of a scalar."""
        with _opened(self.path, self.name) as part:
            values: torch.Tensor = part[start:stop] if self.shape else part[...]
        return values

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self.rows(0, self.shape[0] if self.shape else 0)


@contextmanager
def _opened(path: Path, name: str) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file.get_slice(name)
    except (OSError, SafetensorError) as error:
        raise Unreadable(f"{name} in {path.name} cannot be read ({error})") from error


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, n] to float32 [rows, n * 32 / bits]: lowest bits first, minus half the range."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return (values.flatten(1) - (1 << (bits - 1))).float()
