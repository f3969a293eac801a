"""Starting from a published drafter: its `fc`, decoder layers and norm, never its vocabulary.

Takes EAGLE-3 checkpoints in flat form (`midlayer.*` or `layers.0.*`) and in speculators form.  Embedding, head
and both maps are rebuilt from the verifier under this run's mapping: a head row kept under another mapping
would mean another token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from slipstream.errors import InputError

REBUILT = ("embed_tokens.", "lm_head.", "d2t", "t2d", "verifier_norm.", "verifier_lm_head.")


def canonical(name: str) -> str:
    """The name under which speculators knows a tensor of an EAGLE-3 checkpoint."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint folder under their canonical names; raises InputError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(
            f"{folder}: no .safetensors file to warm-start from; set drafter.init_from to a checkpoint folder"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= {canonical(name): tensor for name, tensor in load_file(file).items()}
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: cannot be read as safetensors ({error}); fetch the checkpoint again") from error
    return tensors


def apply(model: Any, folder: Path) -> dict[str, str]:
    """Copies the checkpoint's tensors into `model`; returns what became of each ("taken" or "rebuilt").

    Raises InputError naming the first tensor that is missing, unknown or of another shape.
    """
    given = read(folder)
    wanted = {name: value for name, value in model.state_dict().items() if not name.startswith(REBUILT)}
    fate = {name: "rebuilt" for name in given if name.startswith(REBUILT)}
    if unknown := sorted(given.keys() - wanted.keys() - fate.keys()):
        raise InputError(f"{folder}: tensor {unknown[0]} has no place in this drafter; check drafter.shape")
    for name, value in wanted.items():
        if name not in given:
            raise InputError(f"{folder}: tensor {name} is missing, so this drafter cannot start from it")
        if given[name].shape != value.shape:
            raise InputError(
                f"{folder}: tensor {name} is {list(given[name].shape)}, this drafter needs {list(value.shape)}; "
                "check drafter.shape and features.layer_ids"
            )
        fate[name] = "taken"
    model.load_state_dict({name: given[name].to(wanted[name].dtype) for name in wanted}, strict=False)
    return fate
