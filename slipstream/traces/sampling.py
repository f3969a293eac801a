"""How each prompt is asked: the sampling mode it draws and the request fields that follow.

Everything here follows from the prompt's key, so a repeated request is the same request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from slipstream.config import Sampling, TracesConfig
from slipstream.digest import digest

NO_THINKING = {"thinking": False, "enable_thinking": False}  # Kimi's and DeepSeek's word for it, Qwen's and GLM's
OFF = -1  # said, not left out: vLLM would fill in the top_k of the verifier's generation_config.json


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def draw(config: TracesConfig, key: str) -> Sampling:
    """The mode of this prompt: its place in [0, 1) among the cumulative weights.

    A changed weight moves only the prompts whose place changes sides.
    """
    if len(config.sampling) == 1:
        return config.sampling[0]
    total = sum(mode.weight for mode in config.sampling)
    place = _hash(f"mode:{config.seed}:{key}") / 2**64 * total
    for mode in config.sampling:
        place -= mode.weight
        if place < 0:
            return mode
    return config.sampling[-1]


def fields(config: TracesConfig, key: str, turn: int = 0) -> dict[str, Any]:
    """The sampling fields of the request for one turn: OpenAI's names, and vLLM's beyond them."""
    mode = draw(config, key)
    made: dict[str, Any] = {"max_tokens": config.max_tokens, "temperature": mode.temperature}
    if mode.temperature > 0:
        made |= {"top_p": mode.top_p, "seed": _hash(f"{config.seed}:{key}:{turn}") >> 33}
        made["top_k"] = mode.top_k or OFF
    if mode.reasoning_effort is not None:
        made["reasoning_effort"] = mode.reasoning_effort
    if not mode.thinking:
        made["chat_template_kwargs"] = dict(NO_THINKING)
    return made


def template(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a request's fields tell the chat template."""
    told: Mapping[str, Any] = fields.get("chat_template_kwargs", {})
    return told


def told_not_to_think(fields: Mapping[str, Any]) -> bool:
    """Whether a request asks for an answer without thinking."""
    return template(fields).get("thinking") is False


def row_key(config: TracesConfig, key: str) -> str:
    """Names a prompt asked this way: what the pool records its answers under."""
    return digest([key, fields(config, key)])
