"""The rotary embedding that a config.json names, under every spelling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream import rope
from slipstream.config import RopeScaling
from slipstream.errors import InputError

# published values: deepseek-ai/DeepSeek-V3, moonshotai/Kimi-K2.5, meta-llama/Llama-3.1-8B, openai/gpt-oss-120b,
# meta-llama/Llama-4-Scout-17B-16E-Instruct, google/gemma-3-4b-it
DEEPSEEK = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
KIMI = DEEPSEEK | {"factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
GPT_OSS = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": False,
}  # fmt: skip
SCOUT = LLAMA | {"factor": 16.0, "high_freq_factor": 1.0}
GEMMA_NEW = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

READ: dict[str, tuple[dict[str, Any], float, dict[str, Any] | None]] = {
    "theta alone": ({"rope_theta": 50_000}, 50_000.0, None),
    "null scaling": ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
    "default, old": ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5, None),
    "default, new": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
    "theta inside and outside": (
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None,
    ),
    "nothing": ({}, 10_000.0, None),
    "nothing, by Llama 4's class": ({"model_type": "llama4_text"}, 500_000.0, None),
    "multimodal": ({"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, 1e6, None),
    "linear, old": (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4}}, 1e4,
        {"rope_type": "linear", "factor": 4.0},
    ),
    "dynamic": (
        {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1e4,
        {"rope_type": "dynamic", "factor": 2.0},
    ),
    "llama3": ({"rope_theta": 5e5, "rope_scaling": LLAMA}, 5e5, LLAMA),
    "llama3, new": ({"rope_parameters": LLAMA | {"rope_theta": 5e5}}, 5e5, LLAMA),
    "Llama 4": ({"rope_theta": 5e5, "rope_scaling": SCOUT}, 5e5, SCOUT),
    "gpt-oss": ({"rope_theta": 150_000, "rope_scaling": GPT_OSS}, 150_000.0, GPT_OSS),
    "Kimi": (
        {"rope_theta": 50_000.0, "rope_scaling": KIMI, "max_position_embeddings": 262144}, 50_000.0,
        {
            "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0,
        },
    ),
    "DeepSeek with unequal scales": (
        {"rope_theta": 10_000, "rope_scaling": DEEPSEEK | {"mscale": 0.707}}, 10_000.0,
        {
            "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0,
            "attention_factor": (1 + 0.0707 * math.log(40)) / (1 + 0.1 * math.log(40)),
        },
    ),
    "yarn whose factor is to be concluded": (
        {
            "rope_theta": 1e6, "max_position_embeddings": 131072,
            "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32768, "factor": None},
        },
        1e6, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "yarn whose original is the positions'": (
        {"rope_theta": 1e6, "max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        1e6, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "Gemma 3, old": (
        {
            "model_type": "gemma3_text", "rope_theta": 1_000_000, "rope_local_base_freq": 10_000,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        1_000_000.0, {"rope_type": "linear", "factor": 8.0},
    ),
    "Gemma 3 as published, theta by its class": (
        {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        1_000_000.0, {"rope_type": "linear", "factor": 8.0},
    ),
    "Gemma 3, new": ({"rope_parameters": GEMMA_NEW}, 1_000_000.0, {"rope_type": "linear", "factor": 8.0}),
    "both spellings, as exports write them": (
        {"rope_theta": 5e5, "rope_scaling": LLAMA, "rope_parameters": LLAMA | {"rope_theta": 5e5}}, 5e5, LLAMA,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_rope_is_read_under_every_spelling(name: str) -> None:
    text, theta, scaling = READ[name]
    expected = scaling and RopeScaling.model_validate(scaling)
    assert rope.read(text, "config.json") == (theta, expected)


@pytest.mark.parametrize("name", [name for name in READ if READ[name][0].get("max_position_embeddings")] + ["gpt-oss"])
def test_the_drafters_rope_turns_as_the_verifiers_fields_say(name: str) -> None:
    """transformers, given the verifier's own fields and given ours, computes the same angles and scale."""
    text = {"max_position_embeddings": 131072, "head_dim": 16} | READ[name][0]
    given = LlamaRotaryEmbedding(LlamaConfig(**text))
    ours = LlamaConfig(
        head_dim=16, max_position_embeddings=text["max_position_embeddings"],
        rope_parameters=rope.parameters(*rope.read(text, "config.json")),
    )  # fmt: skip
    made = LlamaRotaryEmbedding(ours)
    torch.testing.assert_close(made.inv_freq, given.inv_freq, rtol=0, atol=0)
    assert made.attention_scaling == pytest.approx(given.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, r"^here: rope type 'longrope' .*yarn, llama3"),
        ({"rope_scaling": {"rope_type": "su"}}, "^here: rope type 'su'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "^here: rope type 'proportional'"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
            "^here: rope type 'dynamic' with alpha",
        ),
        ({"rope_scaling": {"type": ["yarn"]}}, "^here: rope type "),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "linear"}}, "^here: `factor`"),
        ({"rope_scaling": {"type": "linear", "factor": "four"}}, "^here: `factor`"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "^here: `factor`"),
        ({"rope_scaling": "yarn"}, "^here: rope_scaling is 'yarn'"),
        ({"rope_theta": "10k"}, "^here: rope_theta is '10k'"),
        ({"rope_theta": -1}, "^here: rope_theta is -1"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, "sliding_attention .*full_attention"),
        ({"rope_scaling": LLAMA, "rope_parameters": LLAMA | {"factor": 4.0}}, "^here: .*two ropes"),
    ],
)
def test_what_no_drafter_is_trained_with_is_refused_by_name(text: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        rope.read(text, "here")


def test_a_rope_in_a_run_configuration_is_complete_and_uses_what_it_names() -> None:
    with pytest.raises(ValueError, match="llama3 needs original_max_position_embeddings"):
        RopeScaling(rope_type="llama3", factor=8.0)
    with pytest.raises(ValueError, match="linear does not use beta_fast"):
        RopeScaling(rope_type="linear", factor=8.0, beta_fast=32.0)
