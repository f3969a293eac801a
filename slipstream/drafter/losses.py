"""Which loss training minimises: speculators' seven, one of them or a weighted sum."""

from __future__ import annotations

import json
from typing import Any

from slipstream.config import DrafterConfig


def spec(config: DrafterConfig) -> str:
    """speculators' `loss_fn`: a name, or a JSON object of names and weights."""
    return json.dumps(config.loss_weights, sort_keys=True) if config.loss_weights else config.loss


def call_arguments(model: Any, config: DrafterConfig, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the class `model` is called with in training and in validation; `device` is cuda or cpu.

    speculators' fused losses need Triton; its eager ones have the same values.
    """
    arguments: tuple[dict[str, Any], dict[str, Any]] = model.get_trainer_kwargs(
        loss_fn=spec(config),
        loss_implementation="eager" if device == "cpu" else "fused",
        ttt_steps=config.ttt_steps,
        ttt_step_loss_decay=config.ttt_step_loss_decay,
    )
    return arguments
