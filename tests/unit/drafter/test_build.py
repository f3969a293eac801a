"""The decoder's configuration is the configured shape and no default of a library."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.config import load_config
from slipstream.drafter.build import layer_config


def test_the_published_shape_for_kimi(root: Path) -> None:
    shape = load_config(root / "deployments" / "kimi-k2.5-8gpu.yaml").drafter.shape
    made = layer_config(shape, 7168, 163840)
    assert (made.hidden_size, made.vocab_size, made.num_hidden_layers) == (7168, 163840, 1)
    assert (made.num_attention_heads, made.num_key_value_heads, made.head_dim) == (64, 64, 128)
    assert (made.intermediate_size, made.rms_norm_eps, made.max_position_embeddings) == (18432, 1e-6, 262144)
    assert (made.tie_word_embeddings, made.attention_bias, made.mlp_bias) == (False, False, False)
    assert made.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize("theta", [10000.0, 50000.0])
def test_rope_is_the_configured_one(root: Path, theta: float) -> None:
    """theta ** (-2 i / head_dim), as in the RoFormer paper."""
    shape = load_config(root / "deployments" / "pocket.yaml").drafter.shape.model_copy(update={"rope_theta": theta})
    made = layer_config(shape, 128, 512)
    expected = [theta ** (-2 * i / shape.head_dim) for i in range(shape.head_dim // 2)]
    assert LlamaRotaryEmbedding(made).inv_freq.tolist() == pytest.approx(expected, rel=1e-6)
