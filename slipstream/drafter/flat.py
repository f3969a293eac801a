"""The flat EAGLE-3 form that vLLM and SGLang load: `LlamaForCausalLMEagle3`, `midlayer.*`, maps inside.

The auxiliary layer ids stand at the top level (vLLM's V2 runner reads only those) and in `eagle_config` (vLLM's
V1 runner and SGLang); the final layer's id is never among them.  Rope is written in the old spelling (SGLang,
transformers 4) and the new one (transformers 5) with the same values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from slipstream import vocabulary
from slipstream.config import Dtype
from slipstream.errors import Damaged

EXPORTED = (
    *("embed_tokens.weight", "fc.weight", "layers.0.", "norm.weight", "lm_head.weight", "d2t", "t2d"),
    *("input_norm.weight", "fc_norm."),  # with norm_before_fc, with fc_norm
)
VERIFIERS = ("verifier_norm.", "verifier_lm_head.")  # the verifier's own, for training only
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def tensors(given: dict[str, torch.Tensor], embeddings: bool = True) -> dict[str, torch.Tensor]:
    """A speculators checkpoint's tensors under the flat form's names, the embedding only if wanted.

    Raises Damaged for a tensor that the flat form has no name for and for a mapping that breaks an invariant.
    """
    flat: dict[str, torch.Tensor] = {}
    for name, tensor in given.items():
        if name.startswith(VERIFIERS) or (name == "embed_tokens.weight" and not embeddings):
            continue
        if not name.startswith(EXPORTED):
            raise Damaged(f"tensor {name} has no place in the flat EAGLE-3 form (one decoder layer)")
        flat[name.replace("layers.0.", "midlayer.", 1)] = tensor
    vocabulary.check(flat["t2d"].numpy(), flat["d2t"].numpy())
    return flat


def config(speculators: dict[str, Any], dtype: Dtype) -> dict[str, Any]:
    """The flat form's `config.json` from a speculators `config.json` whose decoder is spelled out."""
    layer = speculators["transformer_layer_config"]
    aux = list(speculators["eagle_aux_hidden_state_layer_ids"])
    rope = layer["rope_parameters"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
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
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": layer["vocab_size"],
        "draft_vocab_size": speculators["draft_vocab_size"],
        **{flag: True for flag in NORM_FLAGS if speculators.get(flag)},
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
    """`speculators` with its decoder's fields spelled out.

    The file may leave out what transformers has a default for; vLLM reads the fields without transformers' class, so
    that they would be missing there.
    """
    from transformers import AutoConfig, PreTrainedConfig

    given = speculators["transformer_layer_config"]
    full = AutoConfig.for_model(**{"model_type": "llama", **given}).to_dict()
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)} | {"_name_or_path", "output_attentions"}
    own = {name: value for name, value in full.items() if name not in common or name == "model_type"}
    return {**speculators, "transformer_layer_config": own}
