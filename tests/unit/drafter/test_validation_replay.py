"""The replay of an epoch on several ranks, and what training does with its figures."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from speculators.train.distributed import apply_fully_sharded
from torch.nn.parallel import DistributedDataParallel

from slipstream.drafter import checkpoints, validation_replay
from slipstream.drafter.checkpoints import Position
from slipstream.drafter.interruption import Interruption
from slipstream.drafter.trainer import EpochTrainer
from tests.unit.acceptance.test_replay_chains import TOKENS, drafter, packed


def batches() -> list[dict[str, torch.Tensor]]:
    """Four batches, and one without rows."""
    made = []
    for seed in range(4):
        batch = packed()
        torch.manual_seed(seed)
        batch["input_ids"] = batch["input_ids"].roll(seed, dims=1)
        batch["hidden_states"] = torch.randn_like(batch["hidden_states"])
        made.append(batch)
    made.append({**packed(), "document_ids": torch.full_like(made[0]["document_ids"], -1)})
    return made


def measured(model: Any, mine: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    return validation_replay.measure(model, mine, TOKENS, "cpu", torch.float32)


def one_rank(rank: int, wrapped: str, folder: Path) -> None:
    """A process of two, each with its batches."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model: Any = drafter().train()
    if wrapped == "ddp":
        model.fc.weight.requires_grad_(True)
        model = DistributedDataParallel(model)
    else:
        apply_fully_sharded(model, param_dtype=torch.float32)
    *full, empty = batches()
    shares = [full[:3], [full[3], empty, empty]]  # as many on every rank, or FSDP waits for ever
    found = measured(model, shares[rank])
    assert model.training
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # gloo's threads sometimes hang when their objects are taken apart


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
def test_ranks_together_find_what_one_finds(wrapped: str, tmp_path: Path) -> None:
    """So every rank takes the same decision, and the figures do not depend on how many devices train."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=one_rank, args=(rank, wrapped, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    alone = measured(drafter(), batches())
    assert found == [alone, alone]
    assert alone["drafts"] > 50


class Scripted(EpochTrainer):
    """A trainer whose epochs are figures from a list."""

    def __init__(self, folder: Path, lengths: list[float], patience: int | None) -> None:
        self.config: Any = SimpleNamespace(save_path=str(folder), num_epochs=len(lengths))
        self.course: Any = SimpleNamespace(patience=patience, interruption=Interruption())
        self.lengths, self.trained = lengths, []
        self.is_distributed, self.steps = False, [1] * len(lengths)
        self.position = Position(len(checkpoints.finished_epochs(folder)))

    def train_epoch(self, epoch: int, **_: Any) -> None:
        """Notes the epoch."""
        self.trained.append(epoch)

    def evaluate(self, epoch: int) -> dict[str, Any]:
        """The listed figures."""
        return {checkpoints.REPLAY: {"accepted_length": self.lengths[epoch]}}

    def _publish_epoch(self, epoch: int, figures: dict[str, Any]) -> None:
        folder = Path(self.config.save_path) / str(epoch)
        folder.mkdir()
        for name, value in figures.items():
            (folder / name).write_text(json.dumps(value))
        checkpoints.seal(folder, {})
        self.position = Position(epoch + 1)


def test_training_ends_when_patience_does_and_a_resumed_one_trains_no_further(tmp_path: Path) -> None:
    lengths = [2.0, 2.6, 2.5, 2.6, 2.7]
    first = Scripted(tmp_path, lengths, patience=2)
    first.run_training()
    assert first.trained == [0, 1, 2, 3]  # 2.6 at epoch 3 is not longer than 2.6 at epoch 1
    again = Scripted(tmp_path, lengths, patience=2)
    again.run_training()
    assert again.trained == []
    patient = Scripted(tmp_path, lengths, patience=None)
    patient.run_training()
    assert patient.trained == [4]


def test_figures_become_one_number_each_for_a_tracker() -> None:
    found = {"accepted_length": 1.8, "acceptance_per_position": [0.5, 0.3], "drafts": 40}
    assert validation_replay.flat(found) == {
        "accepted_length": 1.8,
        "acceptance_0": 0.5,
        "acceptance_1": 0.3,
        "drafts": 40,
    }
