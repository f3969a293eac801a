"""The decoder's configuration for training, and the proof that an export is served with the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slipstream import rope
from slipstream.config import DraftShape
from slipstream.drafter import described
from slipstream.errors import StageFailed

if TYPE_CHECKING:
    from transformers import LlamaConfig


def layer_config(shape: DraftShape, hidden_size: int, vocab_size: int) -> LlamaConfig:
    """transformers' configuration of the decoder; nothing in it is a library's default that `shape` decides."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        hidden_act="silu",
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=rope.parameters(shape.rope_theta, shape.rope_scaling),
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    )


def require_trained_shape(exported: Path, shape: DraftShape) -> None:
    """Raises StageFailed unless the config.json `exported` describes the decoder that was trained.

    Rope, norms and heads of training and serving are the same or nothing is served: a drafter with another rope
    loads without an error and loses acceptance with length.
    """
    served = described.read(exported).shape
    if served != shape:
        names = [name for name in type(shape).model_fields if getattr(served, name) != getattr(shape, name)]
        differ = ", ".join(f"{name} {getattr(served, name)} instead of {getattr(shape, name)}" for name in names)
        raise StageFailed(f"{exported}: says {differ}, which is not what was trained; nothing is to be served from it")
