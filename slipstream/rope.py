"""The rotary embedding that a config.json names, and the one that a drafter is trained, exported and served with.

Spellings: `rope_theta` with `rope_scaling` (transformers 4; the type under `type` or `rope_type`), `rope_parameters`
(transformers 5), and either by layer type (Gemma 3), where the drafter, which attends to everything, takes that of
`full_attention`.

Training computes the rope in transformers' LlamaRotaryEmbedding, serving in vLLM's get_rope: for the types below both
give the same angles and the same scale (tests hold them together).  Where a field means something to the verifier
alone or is defaulted in several ways, it is spelled out or dropped:

* DeepSeek's `mscale` and `mscale_all_dim` (Kimi too): the verifier multiplies sine and cosine by the quotient of both
  and, inside its own attention, the softmax scale by the square of the second.  A Llama-type drafter has only the
  first; transformers and vLLM take it from `attention_factor` before anything else, so the quotient is written there
  (1.0 where both are equal) and the two names go: an engine that knows only `factor` would scale by 0.1 ln(factor) + 1.
* `original_max_position_embeddings` and yarn's `factor` are written where the file leaves them to be concluded
  from the verifier's own positions: the drafter's may be others.
* `partial_rotary_factor` and `mrope_section` are dropped: a drafter turns whole heads, by one position a token.
* `dynamic` scales only beyond `max_position_embeddings`, where vLLM has no angles: up to there it is the plain rope.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from slipstream.config import ROPE_FIELDS, RopeScaling, describe
from slipstream.errors import InputError
from slipstream.text_fields import class_default

PLAIN = frozenset({"default", "mrope"})  # text has one position a token, so mrope's sections turn alike
OTHER_DYNAMIC = ("alpha", "max_trained_positions")  # vLLM's other formulas under the same name
ORIGINAL = "original_max_position_embeddings"
THETA = 10_000.0  # transformers' and vLLM's when nobody names one


def read(text: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling in the language model's fields `text` of the config file `where`.

    Raises InputError naming the file: a type that drafters are not trained with, two spellings that disagree, a field
    that is missing or wrong.
    """
    old, new = (_spelled(text, name, where) for name in ("rope_scaling", "rope_parameters"))
    theta = new.get("rope_theta") or old.get("rope_theta") or text.get("rope_theta") or _default_theta(text)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise InputError(f"{where}: rope_theta is {theta!r} instead of a number above 0")
    found = [_scaling(spelled, text, where) for spelled in (old, new) if spelled]
    if len(found) == 2 and found[0] != found[1]:
        raise InputError(f"{where}: rope_scaling ({old}) and rope_parameters ({new}) are two ropes; keep one of them")
    return float(theta), found[0] if found else None


def parameters(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """transformers 5's `rope_parameters`; vLLM reads the same."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_theta": theta, **scaling.model_dump(exclude_none=True)}


def for_sglang(scaling: RopeScaling | None) -> dict[str, float]:
    """What SGLang's yarn must find beside the fields of `scaling` to turn alike; empty where it needs nothing.

    It knows neither `attention_factor` nor `mscale`: sine and cosine are multiplied by `attn_factor`, 1 when absent,
    times 0.1 ln(factor) + 1.  transformers and vLLM do not read `attn_factor`.
    Source: YaRNScalingRotaryEmbedding and get_rope in python/sglang/srt/layers/rotary_embedding.
    """
    if scaling is None or scaling.attention_factor is None:
        return {}
    quotient = scaling.attention_factor / _mscale(scaling.factor, 1.0)
    return {} if math.isclose(quotient, 1.0) else {"attn_factor": quotient}


def _spelled(text: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """The rope under one of the two names; empty where the file has none."""
    value = text.get(name) or {}
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {name} is {value!r} instead of an object")
    if value and all(isinstance(each, Mapping | None) for each in value.values()):
        if not value.get("full_attention"):
            raise InputError(f"{where}: {name} has ropes for {', '.join(value)} and none for full_attention")
        value = value["full_attention"]
    return value


def _default_theta(text: Mapping[str, Any]) -> Any:
    theta = class_default(text.get("model_type"), "default_theta")
    if isinstance(theta, Mapping):  # Gemma 3: the sliding layers' beside the full ones'
        theta = theta.get("global", theta.get("full_attention"))
    return theta or THETA


def _scaling(spelled: Mapping[str, Any], text: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = str(spelled.get("rope_type") or spelled.get("type") or "default")
    if kind in PLAIN:
        return None
    other = [name for name in OTHER_DYNAMIC if name in spelled]
    if kind not in ROPE_FIELDS or other:
        raise InputError(
            f"{where}: rope type {kind!r}{f' with {other[0]}' if other else ''} is none that a drafter is trained with "
            f"(default, {', '.join(ROPE_FIELDS)}); set drafter.shape with a rope of its own"
        )
    needed, optional = ROPE_FIELDS[kind]
    values = {name: spelled[name] for name in ("factor", *needed, *optional) if spelled.get(name) is not None}
    positions = text.get("max_position_embeddings")
    if ORIGINAL in needed:  # transformers takes the outer one first
        values[ORIGINAL] = text.get(ORIGINAL) or values.get(ORIGINAL) or positions
        if "factor" not in values and isinstance(positions, int) and isinstance(values[ORIGINAL], int):
            values["factor"] = positions / values[ORIGINAL]
    try:
        scaling = RopeScaling.model_validate({"rope_type": kind, **values})
    except ValidationError as error:
        raise InputError(f"{where}: {describe(error)}; restore the published file or set drafter.shape") from error
    outer, inner = spelled.get("mscale"), spelled.get("mscale_all_dim")
    if kind == "yarn" and scaling.attention_factor is None and outer and inner:
        quotient = _mscale(scaling.factor, outer) / _mscale(scaling.factor, inner)
        return scaling.model_copy(update={"attention_factor": quotient})
    return scaling


def _mscale(factor: float, scale: float) -> float:
    """yarn_get_mscale of DeepSeek's modelling code."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
