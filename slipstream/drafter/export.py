"""The flat EAGLE-3 form that vLLM and SGLang load: `LlamaForCausalLMEagle3`, `midlayer.*`, maps inside.

The auxiliary layer ids stand at the top level (vLLM's V2 runner reads only those) and in `eagle_config` (vLLM's
V1 runner and SGLang); the final layer's id is never among them.  Rope is written in the old spelling (SGLang,
transformers 4) and the new one (transformers 5) with the same values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slipstream import vocabulary
from slipstream.config import Dtype
from slipstream.errors import Damaged

EXPORTED = ("embed_tokens.weight", "fc.weight", "layers.0.", "norm.weight", "lm_head.weight", "d2t", "t2d")


def flat_tensors(tensors: dict[str, torch.Tensor], dtype: Dtype) -> dict[str, torch.Tensor]:
    """A speculators checkpoint's tensors under the flat form's names; floats become `dtype`, maps stay.

    Raises Damaged for a tensor that the flat form has no name for.
    """
    flat: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(("verifier_norm.", "verifier_lm_head.")):
            continue
        if not name.startswith(EXPORTED):
            raise Damaged(f"tensor {name} has no place in the flat EAGLE-3 form (one decoder layer, no extra norms)")
        value = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        flat[name.replace("layers.0.", "midlayer.", 1)] = value.contiguous()
    vocabulary.check(flat["t2d"].numpy(), flat["d2t"].numpy())
    return flat


def flat_config(speculators: dict[str, Any], dtype: Dtype) -> dict[str, Any]:
    """The flat form's `config.json` from a speculators `config.json`."""
    layer = speculators["transformer_layer_config"]
    aux = list(speculators["eagle_aux_hidden_state_layer_ids"])
    rope = layer["rope_parameters"]
    if rope.get("rope_type", "default") != "default":
        raise Damaged(f"rope type {rope['rope_type']} was not trained by this project and is not exported")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": layer["hidden_size"],
        "intermediate_size": layer["intermediate_size"],
        "num_hidden_layers": layer["num_hidden_layers"],
        "num_attention_heads": layer["num_attention_heads"],
        "num_key_value_heads": layer["num_key_value_heads"],
        "head_dim": layer["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": layer["rms_norm_eps"],
        "max_position_embeddings": layer["max_position_embeddings"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": layer["vocab_size"],
        "draft_vocab_size": speculators["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": aux,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": aux,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def layer_defaults(speculators: dict[str, Any]) -> dict[str, Any]:
    """`speculators` with its decoder's fields spelled out (the file holds only what differs from the defaults)."""
    from transformers import LlamaConfig

    layer = LlamaConfig(**speculators["transformer_layer_config"]).to_dict()
    return {**speculators, "transformer_layer_config": layer}


def export(checkpoint: Path, target: Path, dtype: Dtype) -> None:
    """Writes the flat form of a speculators checkpoint folder into the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    config = layer_defaults(json.loads((checkpoint / "config.json").read_text()))
    save_file(
        flat_tensors(load_file(checkpoint / "model.safetensors"), dtype),
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    (target / "config.json").write_text(json.dumps(flat_config(config, dtype), indent=2) + "\n")
