"""Tiny verifier folders: 8 tokens of width 4 unless said otherwise, every tensor another constant ramp."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TOKENS, WIDTH = 8, 4
TEXT: dict[str, Any] = {
    "model_type": "kimi_k2",
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "vocab_size": TOKENS,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def ramp(start: float, rows: int = TOKENS, columns: int = WIDTH) -> torch.Tensor:
    """float32 [rows, columns] that no other start gives."""
    return start + torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns) / 64  # exact in bfloat16


EMBEDDING, HEAD, NORM = ramp(1), ramp(-3), ramp(0.5)[0]
DECOY, DECOY_NORM = torch.full((TOKENS, WIDTH), 99.0), torch.full((WIDTH,), 99.0)


def write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], file: str | None = None
) -> Path:
    """The folder with `tensors` in one `file`, or a tensor a shard beside an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    held = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    if file:
        save_file(held, folder / file)
        return folder
    places = {name: f"model-{number:05}-of-{len(held):05}.safetensors" for number, name in enumerate(held, 1)}
    for name, place in places.items():
        save_file({name: held[name]}, folder / place)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def ends(prefix: str = "model.", head: str | None = "lm_head.weight") -> dict[str, torch.Tensor]:
    """The three tensors under a prefix; without `head` there is none."""
    made = {f"{prefix}embed_tokens.weight": EMBEDDING, f"{prefix}norm.weight": NORM}
    return made | ({head: HEAD} if head else {})
