"""A speculators checkpoint in miniature, its shapes written out by hand, every tensor with values of its own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

T2D = torch.tensor([True, True, True, False, False, True, False, False])
D2T = torch.tensor([0, 0, 0, 2])
LAYER = {
    "self_attn.q_proj.weight": (8, 16),
    "self_attn.k_proj.weight": (4, 16),
    "self_attn.v_proj.weight": (4, 16),
    "self_attn.o_proj.weight": (8, 8),
    "mlp.gate_proj.weight": (16, 8),
    "mlp.up_proj.weight": (16, 8),
    "mlp.down_proj.weight": (8, 16),
    "input_layernorm.weight": (8,),
    "hidden_norm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
}
SHAPES = {
    "embed_tokens.weight": (8, 8),
    "fc.weight": (8, 24),
    **{f"layers.0.{name}": shape for name, shape in LAYER.items()},
    "norm.weight": (8,),
    "lm_head.weight": (4, 8),
}
VERIFIERS = {"verifier_norm.weight": (8,), "verifier_lm_head.weight": (4, 8)}
CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "draft_vocab_size": 4,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
    "norm_before_residual": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["KimiK25ForConditionalGeneration"], "name_or_path": "/nowhere/at/all/Kimi"},
    },
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 4096,
        "vocab_size": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
}


def tensors(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint with the shapes of CONFIG; `more` adds or replaces some."""
    made = {name: torch.full(shape, float(i + 1)) for i, (name, shape) in enumerate((SHAPES | VERIFIERS).items())}
    return made | {"d2t": D2T, "t2d": T2D} | more


def config(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """CONFIG with fields replaced; `layer` replaces some of the decoder's."""
    made = copy.deepcopy(CONFIG) | changes
    made["transformer_layer_config"] |= layer or {}
    return made


def save(folder: Path, config: dict[str, Any] = CONFIG, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(globals()["tensors"]() if tensors is None else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def flat(folder: Path, embeddings: bool = True, **changes: Any) -> Path:
    """A drafter as others publish it: flat, old rope spelling, ids in `eagle_config` only, no `dtype`."""
    layer = CONFIG["transformer_layer_config"]
    written = {name: value for name, value in layer.items() if name != "rope_parameters"} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "draft_vocab_size": 4,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "use_aux_hidden_state": True},
    }
    kept = {name.replace("layers.0.", "midlayer."): value for name, value in tensors().items() if name not in VERIFIERS}
    if not embeddings:
        del kept["embed_tokens.weight"]
    return save(folder, written | changes, kept)
