"""What the config.json of an EAGLE-3 drafter says, in flat form (`LlamaForCausalLMEagle3`) or in speculators form.

Fields that a file leaves out have the defaults of transformers' LlamaConfig, as in the engines that read it.  The norm
options stand at the top level or in `eagle_config`, as do the auxiliary layer ids (vLLM's and SGLang's readers); the
ids may be absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slipstream import rope
from slipstream.config import DraftShape, describe
from slipstream.errors import InputError
from slipstream.text_fields import class_default

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MLA = ("kv_lora_rank", "q_lora_rank")
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Described:
    """A drafter by its config.json: decoder, widths, vocabularies, the layers it listens to (None: not said)."""

    where: str
    shape: DraftShape
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layer_ids: list[int] | None


def read(path: Path) -> Described:
    """The drafter of the config.json at `path`; raises InputError when it is absent or not a Llama-type EAGLE-3."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path}: missing, so nothing says how this drafter was trained; fetch it from where the weights came from"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object")
    return of_config(config, str(path))


def of_config(config: Mapping[str, Any], where: str) -> Described:
    """The drafter that the fields of `config` describe; raises InputError naming `where` and the field."""
    layer = _layer(config, where)
    eagle = config.get("eagle_config") or {}
    heads = _number(layer, "num_attention_heads", where)
    hidden = _number(layer, "hidden_size", where)
    theta, scaling = rope.read(layer, where)
    fields = {
        "num_layers": _number(layer, "num_hidden_layers", where),
        "num_attention_heads": heads,
        "num_key_value_heads": layer.get("num_key_value_heads") or heads,
        "head_dim": layer.get("head_dim") or hidden // heads,
        "intermediate_size": _number(layer, "intermediate_size", where),
        "rms_norm_eps": _number(layer, "rms_norm_eps", where),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": _number(layer, "max_position_embeddings", where),
        **{name: bool(eagle.get(name, config.get(name, False))) for name in NORMS},
    }
    try:
        shape = DraftShape.model_validate(fields)
    except ValidationError as error:
        raise InputError(f"{where}: {describe(error)}") from error
    vocab = _number(layer, "vocab_size", where)
    ids = config.get(IDS) or eagle.get(IDS)
    return Described(
        where, shape, hidden, vocab, config.get("draft_vocab_size") or vocab, ids and [int(i) for i in ids]
    )


def _layer(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The decoder's fields; raises InputError for a decoder that this project does not train."""
    algorithm = config.get("speculators_model_type")
    layer = config.get("transformer_layer_config") if algorithm else config
    if algorithm not in (None, "eagle3") or not isinstance(layer, Mapping):
        raise InputError(f"{where}: a speculators model of type {algorithm!r} where eagle3 is needed")
    named = ", ".join(map(str, config.get("architectures") or [])) or "no architecture"
    kind = layer.get("model_type")
    if "Deepseek" in named or any(layer.get(field) for field in MLA):
        raise InputError(
            f"{where}: {named} is an MLA-type drafter, which speculators 0.9.0 does not train (its EAGLE-3 decoders "
            "are Llama's and Qwen3's); take a Llama-type one"
        )
    if kind != "llama" or (not algorithm and "eagle3" not in named.lower()):
        raise InputError(f"{where}: {named} of model_type {kind!r} is not a Llama-type EAGLE-3 drafter")
    for field, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if (value := layer.get(field, wanted)) != wanted:
            raise InputError(f"{where}: {field} is {value!r} and drafters are trained with {wanted!r}")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        window = layer.get("sliding_window")
        raise InputError(f"{where}: its attention sees {window} tokens and drafters are trained to see all")
    return layer


def _number(layer: Mapping[str, Any], field: str, where: str) -> Any:
    value = layer.get(field, class_default("llama", field))
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise InputError(f"{where}: {field} is {value!r} instead of a number above 0")
    return value
