"""What a server reads of a drafter, and what is refused for it by name.

A loader that does not know an option drops its tensor or its field without a word, and the drafter accepts little.

vLLM 0.32 (model_executor/models/llama_eagle3.py, qwen3_eagle3.py, transformers_utils/configs/speculators/algos.py):
flat and speculators form, all four norm flags in both; the number of auxiliary states from `eagle_config`, which a
speculators form cannot give to the Llama loader, so that it takes three.  The ids themselves come from the top level in
both forms.  `speculators_config` names the verifier only for `vllm serve DRAFTER`; with a model and
`--speculative-config` it is not read, whatever it names.

SGLang (python/sglang/srt/models/llama_eagle3.py at 03d5a7771f): flat form only, three auxiliary states of one layer, no
biases, no norm flag; unknown tensors are skipped.  Newer versions know some of the flags; their older ones lose them.
The embedding is always the verifier's (`set_embed` in eagle_worker.py).
SGLang reads the ids from `eagle_config` and adds one (its id k is the OUTPUT of layer k), except for DeepSeek and Kimi
unless the first id is 1 (deepseek_v2.py since pull request 25454) and for gpt-oss (pull request 32334).
Its yarn scales by a field of its own (`rope.for_sglang`); its dynamic rope turns otherwise at every position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from slipstream import rope
from slipstream.errors import InputError

Engine = Literal["vllm", "sglang"]
Form = Literal["flat", "speculators"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
FORMS: tuple[Form, ...] = get_args(Form)
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SHARED_IDS = ("Deepseek", "DeepSeek", "Kimi", "GptOss")  # verifiers whose ids SGLang takes as vLLM does


def refusal(config: Mapping[str, Any], form: Form, engine: Engine) -> str | None:
    """Why `engine` cannot serve the drafter in this form, None when it can.

    `config` is a speculators `config.json` whose decoder is spelled out.
    """
    return next(_refusals(config, form, engine), None)


def _refusals(config: Mapping[str, Any], form: Form, engine: Engine) -> Iterator[str]:
    layer, states = config["transformer_layer_config"], len(config["eagle_aux_hidden_state_layer_ids"])
    kind, activation = layer.get("model_type", "llama"), layer.get("hidden_act", "silu")
    if engine == "sglang" and form != "flat":
        yield "it loads the flat form only; use --form flat"
    if form == "flat" and kind != "llama":
        yield f"the flat form holds a llama layer, and this drafter's is a {kind} layer; use --form speculators"
    if form == "flat" and "sliding_attention" in (layer.get("layer_types") or ()):
        window = layer.get("sliding_window")
        yield f"the flat form has full attention, and this drafter sees {window} tokens; use --form speculators"
    if activation != "silu":
        yield f"hidden_act is {activation}, and its loader computes silu"
    if engine == "vllm":
        if form == "speculators" and kind == "llama" and states != 3:
            yield f"it takes three auxiliary states in speculators form, and this drafter has {states}; use --form flat"
        return
    for flag in NORM_FLAGS:
        if config.get(flag):
            yield f"its loader does not read {flag}, which this drafter was trained with"
    for bias in ("attention_bias", "mlp_bias"):
        if layer.get(bias):
            yield f"its loader has no biases, and this drafter has {bias}"
    if (layer.get("rope_parameters") or {}).get("rope_type") == "dynamic":
        yield "its dynamic rope changes the base at every position, and this drafter was trained with an unchanged one"
    if states != 3:
        yield f"its loader takes three auxiliary states, and this drafter has {states}"


def require(config: Mapping[str, Any], form: Form, engine: Engine, where: object) -> None:
    """Raises InputError with the reason when `engine` cannot serve the drafter in this form."""
    if (reason := refusal(config, form, engine)) is not None:
        raise InputError(f"{where}: not for {engine}: {reason}")


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The verifier's architectures as a speculators config names them; empty when it does not."""
    named = (config.get("speculators_config") or {}).get("verifier") or {}
    return list(named.get("architectures") or [])


def needs_sglang_export(config: Mapping[str, Any]) -> str | None:
    """Why a flat form that was not written for SGLang would be served wrongly there; None where it would not."""
    ids = list(config["eagle_aux_hidden_state_layer_ids"])
    try:
        shifted = sglang_ids(ids, architectures(config), "") != ids
    except InputError:
        shifted = True
    if shifted:
        return (
            "with this verifier SGLang counts layers from their outputs, and would capture the states one layer later"
        )
    if rope.for_sglang(rope.read(config["transformer_layer_config"], "")[1]):
        return "SGLang does not read attention_factor, and would scale the attention otherwise than in training"
    return None


def sglang_ids(ids: Sequence[int], verifier: Sequence[str], where: object) -> list[int]:
    """What SGLang must find in `eagle_config` to capture the states that vLLM's `ids` name.

    Raises InputError for ids that it cannot be told.
    """
    if not verifier:
        raise InputError(
            f"{where}: not for sglang: how it counts layers depends on the verifier, and nothing says which it is; "
            "name its folder with --verifier"
        )
    if not any(name.startswith(SHARED_IDS) for name in verifier):
        if ids[0] < 1:
            raise InputError(f"{where}: not for sglang: it cannot capture layer id {ids[0]}, the embedding")
        return [layer - 1 for layer in ids]
    if ids[0] == 1 and not any(name.startswith("GptOss") for name in verifier):
        raise InputError(
            f"{where}: not for sglang: it takes ids that begin with 1 ({list(ids)}) for outputs of layers and captures "
            "the states one layer later; train with other features.layer_ids"
        )
    return list(ids)
