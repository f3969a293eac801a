"""speculators' Trainer, made to run on a CPU too and to checkpoint atomically.

What changes, and why (speculators 0.9.0):

* without an accelerator it still asks for one (device 0, autocast on "cuda", synchronize): `use_cpu`;
* it saves before it validates, in bfloat16, under the final name: `run_training` here trains, validates and
  publishes the epoch as one folder in float32.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from speculators.train import checkpointer as checkpointer_module
from speculators.train import trainer as trainer_module
from speculators.train.trainer import Trainer

from slipstream.drafter import checkpoints
from slipstream.errors import StageFailed


def use_cpu() -> None:
    """Lets speculators' training run in this process without an accelerator."""
    trainer_module.get_local_rank = lambda: "cpu"  # type: ignore[assignment,return-value]
    checkpointer_module.get_current_device = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None


class EpochTrainer(Trainer):
    """Trains epoch by epoch; every finished epoch is a complete folder (see `checkpoints`)."""

    def __init__(self, model: Any, config: Any, train_loader: Any, val_loader: Any, device: str) -> None:
        super().__init__(model, config, train_loader, val_loader)
        self.device_type = device

    def run_training(self) -> None:
        """Trains the epochs that have no checkpoint yet."""
        for epoch in range(self.current_epoch, self.config.num_epochs):
            self.train_epoch(epoch)
            metrics = self.val_epoch(epoch) or {}
            self._save(epoch, metrics)

    def _save(self, epoch: int, metrics: dict[str, float]) -> None:
        if wrong := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            raise StageFailed(f"epoch {epoch}: validation metric {wrong[0]} is not finite; lower drafter.learning_rate")
        for name, value in self.model.state_dict().items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise StageFailed(f"epoch {epoch}: {name} holds NaN or infinity; lower drafter.learning_rate")
        name = checkpoints.temporary_name(str(epoch))
        self.checkpointer.save_checkpoint(self.model, self.optimizers, name, float_dtype=torch.float32)
        if self.schedulers:
            self.checkpointer.save_scheduler_state_dict(self.schedulers, name)
        if not self.is_distributed or dist.get_rank() == 0:
            folder = Path(self.checkpointer.path)
            state = {"epoch": epoch, "local_step": 0, "global_step": self.global_step}
            (folder / name / "training_state.json").write_text(json.dumps(state))
            (folder / name / "val_metrics.json").write_text(json.dumps(metrics))
            checkpoints.publish(folder, str(epoch))
        if self.is_distributed:
            dist.barrier()
