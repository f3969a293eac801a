"""The loss that training is told to minimise, against formulas written out here in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from slipstream.config import DrafterConfig, RunConfig
from slipstream.drafter import losses, stage
from tests.unit.drafter.test_stage import FEATURES, WORDS

TOKENS, WORDS_KEPT = 7, 5


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) of each position."""
    return (p * np.log(p / q)).sum(-1)


def overlap(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The probability that rejection sampling accepts q's token (Leviathan et al. 2023, corollary 3.6)."""
    return np.minimum(p, q).sum(-1)


def hybrid(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Samarin et al. 2026 (arXiv 2602.23881): KL where overlap is small, total variation where it is large."""
    weight = np.exp(-3.0 * overlap(p, q))
    return weight * divergence(p, q) + (1 - weight) * (1 - overlap(p, q))


# of the verifier's distribution p and the drafter's q
FORMULAS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "kl_div": divergence,
    "rkl": lambda p, q: divergence(q, p),
    "jsd": lambda p, q: (divergence(p, (p + q) / 2) + divergence(q, (p + q) / 2)) / 2,
    "ce": lambda p, q: -np.log(q[np.arange(len(q)), p.argmax(-1)]),
    "tv": lambda p, q: np.abs(p - q).sum(-1) / 2,
    "nla": lambda p, q: -np.log(overlap(p, q)),
    "lk_hybrid": hybrid,
}


def told(config: DrafterConfig) -> float:
    """The loss of made-up logits, all training-time-test steps together, as speculators computes it with `config`."""
    from speculators.models.eagle3 import core
    from speculators.models.eagle3.metrics import compute_metrics

    arguments, validation = losses.call_arguments(core.Eagle3DraftModel, config, "cpu")
    assert {name: arguments[name] for name in ("ttt_steps", "ttt_step_loss_decay")} == {
        name: validation[name] for name in ("ttt_steps", "ttt_step_loss_decay")
    }
    total = 0.0
    for step in range(arguments["ttt_steps"]):
        drafted, target, mask = made(step)
        loss, _ = compute_metrics(
            torch.tensor(drafted)[None].float(),
            torch.tensor(target)[None].float(),
            torch.tensor(mask)[None],
            torch.ones(1, TOKENS, dtype=torch.bool),
            step,
            arguments["ttt_step_loss_decay"],
            loss_config=arguments["loss_config"],
        )
        total += loss.item()
    return total


def made(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of drafter and verifier [tokens, words], and the loss mask."""
    random = np.random.default_rng(step)
    shape = (TOKENS, WORDS_KEPT)
    return random.normal(size=shape), random.normal(size=shape), np.array([0, 1, 1, 0, 1, 1, 1], dtype=bool)


def expected(name: str, steps: int, decay: float) -> float:
    """Mean over supervised positions; at step k the drafter's i-th position is judged by the target at i + k."""
    total = 0.0
    for step in range(steps):
        drafted, target, mask = made(step)
        p, q = softmax(target[step:]), softmax(drafted[: TOKENS - step])
        total += decay**step * FORMULAS[name](p, q)[mask[step:]].mean()
    return total


def settings(**fields: Any) -> DrafterConfig:
    return DrafterConfig(devices=[], **fields)


@pytest.mark.parametrize("name", FORMULAS)
def test_every_loss_has_the_value_of_its_formula(name: str) -> None:
    config = settings(loss=name, ttt_steps=2, ttt_step_loss_decay=0.5)
    assert told(config) == pytest.approx(expected(name, 2, 0.5), rel=1e-4)


def test_weights_make_a_sum_whatever_the_single_loss_says() -> None:
    config = settings(loss="rkl", loss_weights={"tv": 0.9, "ce": 0.1}, ttt_steps=3)
    assert told(config) == pytest.approx(0.9 * expected("tv", 3, 1.0) + 0.1 * expected("ce", 3, 1.0), rel=1e-4)


@pytest.mark.parametrize("weights", [{"kl": 1.0}, {"ce": -1.0}, {"ce": 0.0, "tv": 0.0}])
def test_weights_that_are_none_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="loss_weights"):
        settings(loss_weights=weights)


def test_a_gpu_takes_the_fused_kernels() -> None:
    import speculators.losses as fused
    from speculators.models.eagle3.core import Eagle3DraftModel

    arguments, _ = losses.call_arguments(Eagle3DraftModel, settings(loss="lk_hybrid"), "cuda")
    assert arguments["loss_config"] == {"lk_hybrid": (fused.lk_hybrid_loss, 1.0)}


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"loss": "tv"}, False),
        ({"loss_weights": {"tv": 1.0}}, False),
        ({"optimizer": "muon"}, False),
        ({"muon_learning_rate": 0.01}, False),
        ({"ttt_steps": 2}, False),
        ({"ttt_step_loss_decay": 0.9}, False),
        ({"noise": 0.05}, False),
        ({"trackers": ["wandb"]}, True),
        ({"max_loss_factor": 5.0}, True),
    ],
)
def test_the_key_follows_the_options_that_change_weights(
    make_config: Callable[..., RunConfig], changes: dict[str, Any], same: bool
) -> None:
    before = stage.key(make_config(), FEATURES, WORDS)
    assert (stage.key(make_config(drafter=changes), FEATURES, WORDS) == before) == same
