"""The flat EAGLE-3 form that vLLM and SGLang load: `LlamaForCausalLMEagle3`, `midlayer.*`, maps inside.

The auxiliary layer ids stand at the top level (vLLM's runners read those first, its V2 runner those alone) and in
`eagle_config` (SGLang, and vLLM for their number); the final layer's id is never among them.  Rope is written in the
old spelling (SGLang, transformers 4) and the new one (transformers 5) with the same values.  The head is always inside.
Without the embedding both servers share the verifier's, whose rows must have the drafter's width (vLLM 0.32:
v1/spec_decode/llm_base_proposer.py, not under pipeline parallelism, where it would stay as it was made).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slipstream import rope
from slipstream.config import Dtype
from slipstream.drafter import engines
from slipstream.errors import Damaged

ARCHITECTURE = "LlamaForCausalLMEagle3"
TENSORS = (
    *("embed_tokens.weight", "fc.weight", "layers.0.", "norm.weight", "lm_head.weight", "d2t", "t2d"),
    *("input_norm.weight", "fc_norm."),  # with norm_before_fc, with fc_norm
)


def tensors(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A speculators checkpoint's tensors under the flat form's names.

    Raises Damaged for a tensor that the flat form has no name for.
    """
    flat: dict[str, torch.Tensor] = {}
    for name, tensor in given.items():
        if not name.startswith(TENSORS):
            raise Damaged(f"tensor {name} has no place in the flat EAGLE-3 form (one decoder layer)")
        flat[name.replace("layers.0.", "midlayer.", 1)] = tensor
    return flat


def config(speculators: Mapping[str, Any], dtype: Dtype, where: object, sglang: bool = False) -> dict[str, Any]:
    """The flat form's `config.json` from a speculators `config.json` whose decoder is spelled out.

    With `sglang` the ids in `eagle_config` are the ones by which SGLang captures the same states (`engines`), and yarn
    has the field by which it scales alike (`rope.for_sglang`).
    Raises InputError for a rope that cannot be written in both spellings, and for what SGLang cannot be told.
    """
    layer = speculators["transformer_layer_config"]
    aux = list(speculators["eagle_aux_hidden_state_layer_ids"])
    theta, scaling = rope.read(layer, str(where))
    beside = rope.for_sglang(scaling) if sglang else {}
    width = speculators.get("target_hidden_size")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": layer["hidden_size"],
        "intermediate_size": layer["intermediate_size"],
        "num_hidden_layers": layer["num_hidden_layers"],
        "num_attention_heads": layer["num_attention_heads"],
        "num_key_value_heads": layer["num_key_value_heads"],
        "head_dim": layer["head_dim"],
        "hidden_act": layer["hidden_act"],
        "rms_norm_eps": layer["rms_norm_eps"],
        "max_position_embeddings": layer["max_position_embeddings"],
        "rope_theta": theta,
        "rope_scaling": scaling and scaling.model_dump(exclude_none=True) | beside,
        "rope_parameters": rope.parameters(theta, scaling) | beside,
        "attention_bias": layer["attention_bias"],
        "mlp_bias": layer["mlp_bias"],
        "tie_word_embeddings": False,
        "vocab_size": layer["vocab_size"],
        "draft_vocab_size": speculators["draft_vocab_size"],
        **({"target_hidden_size": width} if width else {}),
        **{flag: True for flag in engines.NORM_FLAGS if speculators.get(flag)},
        "eagle_aux_hidden_state_layer_ids": aux,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": (
                engines.sglang_ids(aux, engines.architectures(speculators), where) if sglang else aux
            ),
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
        "dtype": dtype,
        "torch_dtype": dtype,
    }
