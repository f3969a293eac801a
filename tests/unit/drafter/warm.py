"""Drafters to start from, in miniature and in the forms that are published: written by hand, not by the exporter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, IDS = 8, 16, [2, 3, 5]
LAYER: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 20, "rms_norm_eps": 1e-6, "vocab_size": VOCAB,
    "max_position_embeddings": 4096, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
TRAINED = {
    "fc.weight": (8, 24),
    "layers.0.self_attn.q_proj.weight": (12, 16),
    "layers.0.self_attn.k_proj.weight": (6, 16),
    "layers.0.self_attn.v_proj.weight": (6, 16),
    "layers.0.self_attn.o_proj.weight": (8, 12),
    "layers.0.mlp.gate_proj.weight": (20, 8),
    "layers.0.mlp.up_proj.weight": (20, 8),
    "layers.0.mlp.down_proj.weight": (8, 20),
    "layers.0.input_layernorm.weight": (8,),
    "layers.0.hidden_norm.weight": (8,),
    "layers.0.post_attention_layernorm.weight": (8,),
    "norm.weight": (8,),
}


def mapping(tokens: list[int], vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """`t2d` and `d2t` of these target ids, by their definition."""
    t2d = torch.tensor([token in tokens for token in range(vocab)])
    return {"t2d": t2d, "d2t": torch.tensor([token - draft for draft, token in enumerate(sorted(tokens))])}


def t2d(tokens: list[int]) -> np.ndarray:
    """This run's."""
    made: np.ndarray = mapping(tokens)["t2d"].numpy()
    return made


def tensors(tokens: list[int]) -> dict[str, torch.Tensor]:
    """Every tensor of ones; row i of the head is all the id of the token that it means."""
    made = {name: torch.ones(shape) for name, shape in TRAINED.items()}
    head = torch.tensor(sorted(tokens), dtype=torch.float32)[:, None].expand(-1, HIDDEN).contiguous()
    return made | {"lm_head.weight": head, "embed_tokens.weight": torch.ones(VOCAB, HIDDEN)} | mapping(tokens)


def flat(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the flat form's names, floats in bfloat16."""
    return {
        name.replace("layers.0.", "midlayer."): value.bfloat16() if value.is_floating_point() else value
        for name, value in given.items()
    }


def flat_config(**changes: Any) -> dict[str, Any]:
    """A config.json in AQ-MedAI's form."""
    return (
        LAYER
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 4,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": IDS, "use_aux_hidden_state": True},
            "rope_theta": 1e6,
            "rope_scaling": None,
            "torch_dtype": "bfloat16",
        }
        | changes
    )


def speculators_config(**changes: Any) -> dict[str, Any]:
    """A config.json in speculators' form."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 4,
        "eagle_aux_hidden_state_layer_ids": IDS,
        "transformer_layer_config": LAYER | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    } | changes


def save(folder: Path, given: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    """Writes a checkpoint folder."""
    folder.mkdir(exist_ok=True)
    save_file(given, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(flat_config() if config is None else config))
    return folder
