"""The published families' config.json files, read field by field; the expected values were written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import rope, verifier
from slipstream.config import RopeScaling
from slipstream.text_fields import TextFields

KIMI = RopeScaling(
    rope_type="yarn", factor=64.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0,
    attention_factor=1.0,
)  # fmt: skip
LLAMA = RopeScaling(
    rope_type="llama3", factor=8.0, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
GPT_OSS = RopeScaling(
    rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0, truncate=False
)

# hidden, layers, vocabulary, end tokens; heads, key-value heads, head width, MLP; epsilon, positions, window, tied
FAMILIES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]] = {
    "kimi-k2.5": ((7168, 61, 163840, (163586,)), (64, 64, None, 18432), (1e-5, 262144, None, False)),
    "deepseek-v3": ((7168, 61, 129280, (1,)), (128, 128, None, 18432), (1e-6, 163840, None, False)),
    "qwen3-32b": ((5120, 64, 151936, (151645,)), (64, 8, 128, 25600), (1e-6, 40960, None, False)),
    "qwen3-235b-a22b": ((4096, 94, 151936, (151645,)), (64, 4, 128, 12288), (1e-6, 40960, None, False)),
    "llama-3.1-8b-instruct": (
        (4096, 32, 128256, (128001, 128008, 128009)), (32, 8, 128, 14336), (1e-5, 131072, None, False),
    ),
    "llama-4-scout": (
        (5120, 48, 202048, (200001, 200007, 200008)), (40, 8, 128, 16384), (1e-5, 10485760, None, False),
    ),
    "gpt-oss-120b": ((2880, 36, 201088, (200002,)), (64, 8, 64, 2880), (1e-5, 131072, 128, False)),
    "gemma-3-27b-it": ((5376, 62, 262208, (1, 106)), (32, 16, 128, 21504), (1e-6, 131072, 1024, True)),
}  # fmt: skip
TYPES = {
    "kimi-k2.5": "kimi_k2",
    "deepseek-v3": "deepseek_v3",
    "qwen3-32b": "qwen3",
    "qwen3-235b-a22b": "qwen3_moe",
    "llama-3.1-8b-instruct": "llama",
    "llama-4-scout": "llama4_text",
    "gpt-oss-120b": "gpt_oss",
    "gemma-3-27b-it": "gemma3_text",
}
ROPES: dict[str, tuple[float, RopeScaling | None]] = {
    "kimi-k2.5": (50_000.0, KIMI),
    "deepseek-v3": (10_000.0, KIMI.model_copy(update={"factor": 40.0})),
    "qwen3-32b": (1_000_000.0, None),
    "qwen3-235b-a22b": (1_000_000.0, None),
    "llama-3.1-8b-instruct": (500_000.0, LLAMA),
    "llama-4-scout": (500_000.0, LLAMA.model_copy(update={"factor": 16.0, "high_freq_factor": 1.0})),
    "gpt-oss-120b": (150_000.0, GPT_OSS),
    "gemma-3-27b-it": (1_000_000.0, RopeScaling(rope_type="linear", factor=8.0)),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_family_is_read_field_by_field(name: str) -> None:
    shape = verifier.published_shape(name)
    assert (
        (shape.hidden_size, shape.num_layers, shape.vocab_size, shape.eos_token_ids),
        (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.intermediate_size),
        (shape.rms_norm_eps, shape.max_position_embeddings, shape.sliding_window, shape.tied),
    ) == FAMILIES[name]
    assert shape.text_model_type == TYPES[name]
    assert shape.rope() == ROPES[name]


def test_every_published_shape_is_among_them(root: Path) -> None:
    published = {path.stem for path in (root / "slipstream" / "verifiers").glob("*.json")}
    assert published == FAMILIES.keys() == TYPES.keys() == ROPES.keys()
    for name in published:
        assert json.loads((root / "slipstream" / "verifiers" / f"{name}.json").read_text())["source"]


def test_widths_at_the_top_level_are_another_towers() -> None:
    config = {
        "model_type": "several", "hidden_size": 1152, "num_attention_heads": 16, "vocab_size": 100, "eos_token_id": 7,
        "rms_norm_eps": 1e-4, "tie_word_embeddings": True,
        "text_config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    }  # fmt: skip
    shape = verifier.shape_of(config, "here")
    assert (shape.hidden_size, shape.num_attention_heads, shape.head_dim) == (64, 4, 16)
    assert (shape.vocab_size, shape.eos_token_ids, shape.rms_norm_eps, shape.tied) == (100, (7,), 1e-4, True)
    assert (shape.num_key_value_heads, shape.intermediate_size, shape.sliding_window) == (4, None, None)


@pytest.mark.parametrize("nest", ["text_config", "llm_config", "language_config"])
def test_the_language_models_fields_are_found_under_each_name(nest: str) -> None:
    config = {"model_type": "outer", nest: {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9}}
    assert verifier.shape_of(config, "here").hidden_size == 8
    assert TextFields.of(config, "here").model_type == "outer"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("spelling", ["old", "new"])
def test_41_a_drafter_inherits_rope_and_positions(nested: bool, spelling: str) -> None:
    """The report's configuration: what a drafter's shape is made from, under both spellings and at both levels."""
    scaling = {"type": "yarn", "factor": 32, "original_max_position_embeddings": 4096}
    ropes: dict[str, dict[str, Any]] = {
        "old": {"rope_scaling": scaling, "rope_theta": 50000},
        "new": {"rope_parameters": {**scaling, "rope_theta": 50000}},
    }
    text = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9, "max_position_embeddings": 131072} | ropes[
        spelling
    ]
    shape = verifier.shape_of({"text_config": text} if nested else text, "config.json")
    expected = RopeScaling(rope_type="yarn", factor=32, original_max_position_embeddings=4096)
    assert (shape.rope(), shape.max_position_embeddings) == ((50_000.0, expected), 131072)
    assert rope.parameters(*shape.rope()) == {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 50_000.0,
    }
