"""Small pieces of the drafter stage: what its key holds, what it counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream import atomic
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.drafter import stage

FEATURES = Artifact(path="f", stage="features", key="k", content="features")
WORDS = Artifact(path="v", stage="vocabulary", key="k", content="words")


def test_parameters_are_counted_and_the_frozen_ones_apart(tmp_path: Path) -> None:
    tensors = {
        "embed_tokens.weight": torch.zeros(16, 8),
        "lm_head.weight": torch.zeros(4, 8),
        "fc.weight": torch.zeros(8, 24),
        "midlayer.mlp.up_proj.weight": torch.zeros(32, 8),
        "norm.weight": torch.zeros(8),
        "d2t": torch.zeros(4, dtype=torch.int64),
        "t2d": torch.zeros(16, dtype=torch.bool),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    trained = 8 * 24 + 32 * 8 + 8
    total = 16 * 8 + 4 * 8 + trained
    counted = stage.parameter_counts(tmp_path / "model.safetensors", train_lm_head=False)
    assert counted == {"parameters": total, "trained_parameters": trained}
    counted = stage.parameter_counts(tmp_path / "model.safetensors", train_lm_head=True)
    assert counted == {"parameters": total, "trained_parameters": trained + 4 * 8}


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"num_workers": 3, "log_every": 1, "threads": 2}, True),
        ({"trackers": ["mlflow"], "checkpoint_steps": 5, "keep_checkpoints": "all", "max_loss_factor": 9.0}, True),
        ({"epochs": 4}, False),
        ({"early_stop_patience": 1}, False),
        ({"replay_tokens": 5}, False),  # another epoch may be the best
        ({"noise": 0.05}, False),
        ({"learning_rate": 1e-4}, False),
        ({"seed": 1}, False),
        ({"devices": [0]}, False),  # another device rounds differently
        ({"devices": [0, 1]}, False),
    ],
)
def test_the_key_follows_what_changes_the_drafter(
    make_config: Callable[..., RunConfig], changes: dict[str, Any], same: bool
) -> None:
    before = stage.key(make_config(), FEATURES, WORDS)
    assert (stage.key(make_config(drafter=changes), FEATURES, WORDS) == before) == same


def test_which_gpu_trains_does_not_matter(make_config: Callable[..., RunConfig]) -> None:
    keys = {stage.key(make_config(drafter={"devices": [gpu]}), FEATURES, WORDS) for gpu in (0, 3)}
    assert len(keys) == 1


def test_the_key_follows_the_bytes_of_the_warm_start(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    keys = []
    for name, value in (("a", 0.0), ("b", 0.0), ("c", 1.0)):
        (tmp_path / name).mkdir()
        save_file({"fc.weight": torch.full((2, 2), value)}, tmp_path / name / "model.safetensors")
        keys.append(stage.key(make_config(drafter={"init_from": str(tmp_path / name)}), FEATURES, WORDS))
    assert keys[0] == keys[1] != keys[2]
    assert stage.key(make_config(), FEATURES, WORDS) not in keys


def test_the_key_follows_the_inputs(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    keys = {
        stage.key(config, FEATURES, WORDS),
        stage.key(config, FEATURES.model_copy(update={"content": "x"}), WORDS),
        stage.key(config, FEATURES, WORDS.model_copy(update={"content": "x"})),
    }
    assert len(keys) == 3
    elsewhere = FEATURES.model_copy(update={"path": "elsewhere", "key": "other"})
    assert stage.key(config, elsewhere, WORDS) in keys


def test_best_is_a_link_that_moves_at_once(tmp_path: Path) -> None:
    atomic.point(tmp_path / "best", tmp_path / "epochs/1")
    atomic.point(tmp_path / "best", tmp_path / "epochs/2")
    assert (tmp_path / "best").readlink() == Path("epochs/2")
    assert os.listdir(tmp_path) == ["best"]
