"""An epoch's exports: the folder that servers load, in both forms, made from its checkpoint.

epochs/<epoch>/
  flat/          `LlamaForCausalLMEagle3` for vLLM and SGLang (`flat`)
  speculators/   speculators' own form, for vLLM and to go on from
  export.json    what they were made from and how
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from slipstream import atomic
from slipstream.config import Dtype
from slipstream.drafter import checkpoints, flat
from slipstream.drafter.stage import CHECKPOINTS, CONFIG, EPOCHS, FLAT, WEIGHTS

SPECULATORS, RECORD = "speculators", "export.json"


def export_epoch(folder: Path, name: str, dtype: Dtype, embeddings: bool = True) -> Path:
    """Makes `epochs/<name>/` from `checkpoints/<name>/` in a drafter's folder, whole or not at all, and returns it.

    Exports that are whole and made from this very checkpoint in this way stay as they are, so it may be called as often
    as one likes; they stay too when the checkpoint is gone.  Floats are written in `dtype`.
    Raises Damaged when a tensor or a map of the checkpoint cannot be exported.
    """
    checkpoint, target = folder / CHECKPOINTS / name, folder / EPOCHS / name
    if (checkpoint / WEIGHTS).exists():  # not pruned
        record = _record(checkpoint, dtype, embeddings)
        if not _whole(target) or json.loads((target / RECORD).read_bytes()) != record:
            _make(checkpoint, target, record, dtype, embeddings)
    return target


def _record(checkpoint: Path, dtype: Dtype, embeddings: bool) -> dict[str, Any]:
    """What an export is made from: checkpoints are renamed into place, so size and time name one (10 GB to hash)."""
    weights = (checkpoint / WEIGHTS).stat()
    return {"checkpoint": [weights.st_size, weights.st_mtime_ns], "dtype": dtype, "embeddings": embeddings}


def _whole(target: Path) -> bool:
    """Whether every file of an export can be read; files set aside as damaged are empty."""
    try:
        json.loads((target / RECORD).read_bytes())
        for form in (FLAT, SPECULATORS):
            json.loads((target / form / CONFIG).read_bytes())
            with safe_open(target / form / WEIGHTS, framework="numpy"):
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    return True


def _make(checkpoint: Path, target: Path, record: dict[str, Any], dtype: Dtype, embeddings: bool) -> None:
    temporary = target.parent / checkpoints.temporary_name(target.name)
    shutil.rmtree(temporary, ignore_errors=True)
    config = flat.layer_defaults(json.loads((checkpoint / CONFIG).read_bytes()))
    tensors = cast(load_file(checkpoint / WEIGHTS), dtype)
    _write(temporary / FLAT, flat.tensors(tensors, embeddings), flat.config(config, dtype))
    _write(temporary / SPECULATORS, tensors, speculators_config(config, dtype))
    atomic.write_json(temporary / RECORD, record)
    checkpoints.publish(target.parent, target.name)


def speculators_config(given: dict[str, Any], dtype: Dtype) -> dict[str, Any]:
    """A checkpoint's `config.json` without the code that speculators copies beside its own checkpoints."""
    return {name: value for name, value in given.items() if name != "auto_map"} | {"dtype": dtype}


def cast(given: dict[str, torch.Tensor], dtype: Dtype) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors without the verifier's own; floats become `dtype`, maps stay."""
    return {
        name: (tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in given.items()
        if not name.startswith(flat.VERIFIERS)
    }


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    atomic.fsync_file(folder / WEIGHTS)
    atomic.write_json(folder / CONFIG, config)
    atomic.fsync_folder(folder)
