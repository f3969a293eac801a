"""What a warm start brings: the tensors of a checkpoint folder by header, its config.json, its mapping.

Takes EAGLE-3 drafters in flat form (`midlayer.*`, as AQ-MedAI and lightseekorg publish them, with or without their
embedding) and in speculators form (`layers.0.*`, also without a head).  Reads headers, no weights, so that all that can
be refused is refused in a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from slipstream.drafter import described
from slipstream.errors import InputError
from slipstream.vocabulary import kept

FLOATS = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True)
class Stored:
    """One tensor in a safetensors file, under its name there; `dtype` as safetensors writes it (BF16)."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def load(self) -> torch.Tensor:
        """The tensor as it is stored."""
        with safe_open(self.file, framework="pt") as held:
            tensor: torch.Tensor = held.get_tensor(self.name)
        return tensor


@dataclass(frozen=True)
class Checkpoint:
    """A drafter to start from: tensors by canonical name, what its config.json says, `(t2d, d2t)` if it has them."""

    folder: Path
    tensors: dict[str, Stored]
    says: described.Described
    maps: tuple[np.ndarray, np.ndarray] | None


def canonical(name: str) -> str:
    """The name under which speculators knows a tensor of an EAGLE-3 checkpoint."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def read(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`; raises InputError (no weights, only pickles, unreadable, no Llama-type EAGLE-3)."""
    tensors: dict[str, Stored] = {}
    for file in kept.weights(folder):
        try:
            with safe_open(file, framework="pt") as held:
                for name in held.keys():  # noqa: SIM118 - not a mapping
                    part = held.get_slice(name)
                    if (plain := canonical(name)) in tensors:
                        raise InputError(f"{folder}: {tensors[plain].name} and {name} are both tensor {plain}")
                    tensors[plain] = Stored(file, name, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: cannot be read as safetensors ({error}); fetch the checkpoint again") from error
    return Checkpoint(folder, tensors, described.read(folder / "config.json"), kept.read(folder))
