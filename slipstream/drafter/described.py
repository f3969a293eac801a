"""What the config.json of an EAGLE-3 drafter says, in flat form (`LlamaForCausalLMEagle3`) or in speculators form.

The one reader of both: training, warm start, export and acceptance see a file through `in_speculators_form`.  Fields
that a file leaves out have the defaults of transformers' LlamaConfig, as in the engines that read it.  In the flat form
the norm options stand at the top level or in `eagle_config` (which vLLM asks first), as do the auxiliary layer ids
(where vLLM asks the top level first); the ids may be absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slipstream import rope, verifier
from slipstream.config import DraftShape, describe
from slipstream.drafter.engines import NORM_FLAGS
from slipstream.errors import InputError
from slipstream.text_fields import class_default

MLA = ("kv_lora_rank", "q_lora_rank")
IDS = "eagle_aux_hidden_state_layer_ids"
NEEDED = ("hidden_size", "num_attention_heads", "vocab_size")  # no default of a library's is a drafter's
LAYER_FIELDS = (
    *(*NEEDED, "intermediate_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "max_position_embeddings", "attention_bias", "mlp_bias"),
)


@dataclass(frozen=True)
class Described:
    """A drafter by its config.json: decoder, widths, vocabularies, the layers it listens to (None: not said)."""

    where: str
    shape: DraftShape
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layer_ids: list[int] | None


def load(path: Path) -> dict[str, Any]:
    """The JSON object in the config.json at `path`; raises InputError when there is none."""
    if not path.exists():
        raise InputError(
            f"{path}: missing, so nothing says what drafter this is; fetch it from where the weights came from"
        )
    return verifier.read_json(path)


def read(path: Path) -> Described:
    """The drafter of the config.json at `path`; raises InputError when it is absent or not a Llama-type EAGLE-3."""
    return of_config(load(path), str(path))


def in_speculators_form(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a config.json of either form as speculators has them.

    A speculators config stays as it is but for norm options that it leaves out, which are off (speculators' default;
    vLLM would take `norm_before_residual` for on).  The ids are None where a flat file does not say them.
    Raises InputError naming `where` and the field: another algorithm or architecture, a field that is missing.
    """
    if "speculators_model_type" not in config:
        return _converted(config, where)
    if (algorithm := config["speculators_model_type"]) != "eagle3":
        raise InputError(f"{where}: a speculators model of type {algorithm!r} where eagle3 is needed")
    if not isinstance(config.get("transformer_layer_config"), Mapping):
        raise InputError(f"{where}: no transformer_layer_config, so nothing says the decoder's shape")
    return {**dict.fromkeys(NORM_FLAGS, False), **config}


def _converted(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    named = ", ".join(map(str, config.get("architectures") or [])) or "no architecture"
    kind, inner = config.get("model_type", "llama"), config.get("eagle_config") or {}
    if "Deepseek" in named or any(config.get(field) for field in MLA):
        raise InputError(
            f"{where}: {named} is an MLA-type drafter, which speculators 0.9.0 does not train (its EAGLE-3 decoders "
            "are Llama's and Qwen3's) and the flat form does not hold; take a Llama-type one"
        )
    if kind != "llama" or "eagle3" not in named.lower():
        raise InputError(f"{where}: {named} of model_type {kind!r} is not a Llama-type EAGLE-3 drafter")
    if missing := [name for name in NEEDED if config.get(name) is None]:
        raise InputError(f"{where}: no field {missing[0]!r}")
    _require_full_attention(config, where)
    layer = {name: config[name] for name in LAYER_FIELDS if config.get(name) is not None}
    layer |= {"model_type": kind, "rope_parameters": rope.parameters(*rope.read(config, where))}
    return {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        IDS: config.get(IDS) or inner.get(IDS),
        "target_hidden_size": config.get("target_hidden_size"),
        "tie_word_embeddings": False,
        **{flag: bool(inner.get(flag, config.get(flag, False))) for flag in NORM_FLAGS},
        "transformer_layer_config": layer,
    }


def _require_full_attention(layer: Mapping[str, Any], where: str) -> None:
    if "sliding_attention" in (layer.get("layer_types") or ()):
        window = layer.get("sliding_window")
        raise InputError(f"{where}: its attention sees {window} tokens and drafters are trained to see all")


def of_config(config: Mapping[str, Any], where: str) -> Described:
    """The drafter that the fields of `config` describe; raises InputError naming `where` and the field."""
    says = in_speculators_form(config, where)
    layer = says["transformer_layer_config"]
    _require_trainable(layer, where)
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
        **{flag: bool(says[flag]) for flag in NORM_FLAGS},
    }
    try:
        shape = DraftShape.model_validate(fields)
    except ValidationError as error:
        raise InputError(f"{where}: {describe(error)}") from error
    vocab, ids = _number(layer, "vocab_size", where), says.get(IDS)
    return Described(where, shape, hidden, vocab, says.get("draft_vocab_size") or vocab, ids and [int(i) for i in ids])


def _require_trainable(layer: Mapping[str, Any], where: str) -> None:
    """Raises InputError for a decoder that this project does not train."""
    if (kind := layer.get("model_type")) != "llama":
        raise InputError(f"{where}: a decoder of model_type {kind!r} is not a Llama-type EAGLE-3 drafter's")
    for field, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if (value := layer.get(field, wanted)) != wanted:
            raise InputError(f"{where}: {field} is {value!r} and drafters are trained with {wanted!r}")
    _require_full_attention(layer, where)


def _number(layer: Mapping[str, Any], field: str, where: str) -> Any:
    value = layer.get(field, class_default("llama", field))
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise InputError(f"{where}: {field} is {value!r} instead of a number above 0")
    return value
