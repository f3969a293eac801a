"""Epochs of training over speculators' model, losses and optimizers, that continue where they were interrupted.

What speculators 0.9.0's Trainer gives: the optimizers, the validation epoch, how models are wrapped for DDP and FSDP,
the timer.  What is ours, and why:

* `train_epoch`: the same step, in the same order of operations (autocast forward, backward, clip to norm 1, optimizers,
  schedules, metrics), in methods that can be replaced one by one.  Gone are the recovery of lost samples (our loader
  raises instead), `max_steps`, and progress bars.
* resume: from the newest complete checkpoint, inside an epoch as well, bit for bit (`training_state`, `schedule`,
  `batch_order`); speculators stores bfloat16, overwrites a checkpoint in place and starts schedules at the epoch's
  index.
* an epoch is published when it is validated, as one folder (`checkpoints`).

* guards (`guards`): what went wrong ends training before a checkpoint holds it.

Places for more: `optimizer_of` (which optimizers), `to_device` (batches), `step` (whether and how weights change),
`evaluate` (figures of an epoch, written into its checkpoint), `ended` (stop early).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from speculators.model import SpeculatorModel
from speculators.train import trainer as speculators_trainer
from speculators.train.distributed import apply_fully_sharded
from speculators.train.recovery import RECOVERY_METADATA_KEY
from speculators.train.trainer import Trainer
from speculators.train.utils import normalize_counted_metrics
from torch.nn.parallel import DistributedDataParallel

from slipstream.drafter import (
    checkpoints,
    compute,
    guards,
    schedule,
    selection,
    training_state,
    validation_replay,
)
from slipstream.drafter.checkpoints import Position
from slipstream.drafter.guards import Guard
from slipstream.drafter.interruption import Interrupted, Interruption, Watched
from slipstream.drafter.loaders import Loader
from slipstream.errors import StageFailed

CLIP_NORM = 1.0  # speculators' value


@dataclass(frozen=True)
class Course:
    """Where a training stands and how it is watched.

    `resume_from` is a complete checkpoint or None; `checkpoint_steps` are the steps between two checkpoints inside an
    epoch, None for none; `before_publishing` is called before a checkpoint gets its name.  A loss above
    `max_loss_factor` times the median of the last ones ends training.
    """

    resume_from: Path | None
    checkpoint_steps: int | None
    interruption: Interruption
    max_loss_factor: float
    replay: Callable[[Any], dict[str, Any]]
    patience: int | None = None
    before_publishing: Callable[[], None] = lambda: None


class EpochTrainer(Trainer):
    """Trains epoch by epoch; every finished epoch is a complete folder."""

    def __init__(
        self, model: Any, config: Any, train_loader: Loader, val_loader: Any, device: str, course: Course
    ) -> None:
        self.course = course
        self.order = train_loader.order
        self.steps = self.order.steps(config.num_epochs)  # of each epoch
        train: Any = Watched(train_loader, course.interruption)
        val: Any = Watched(val_loader, course.interruption)
        super().__init__(model, config, train, val)
        self.device_type = device
        self.timer = speculators_trainer._StepTimer()
        self.rows_of = train_loader.rows_of
        # on a CPU looking costs nothing
        every = 1 if device == "cpu" else min(config.log_freq, guards.AT_ONCE)
        self.guard = Guard(course.max_loss_factor, every, self.local_rank, self.rows_of)

    # Where training begins

    def setup_trainer(self) -> None:
        """Takes the position from the checkpoint."""
        self.position, self.global_step = Position(), 0
        folder = self.course.resume_from
        if folder is None:
            return
        state = checkpoints.state(folder)
        self.position = Position(state["next_epoch"], state["next_step"])
        self.global_step = state["global_step"]
        if state["steps"] != self.steps:
            raise StageFailed(
                f"{folder}: written with {state['steps']} steps an epoch, but the data give {self.steps}; "
                f"delete {folder.parent} to train anew"
            )

    def setup_model(self) -> None:
        """Weights of the checkpoint on every rank, then DDP or FSDP as speculators wraps them."""
        SpeculatorModel.verify_training_compatible(self.model)
        if self.course.resume_from is not None:
            training_state.load_weights(self.model, self.course.resume_from)
        if self.is_distributed and self.config.fsdp_shard:
            # every rank built or read the same weights, so each keeps its part
            apply_fully_sharded(self.model, param_dtype=self.config.hidden_states_dtype)
            return
        self.model.to(self.local_rank)  # type: ignore[arg-type]
        if self.is_distributed:
            self.model = DistributedDataParallel(self.model)  # type: ignore[assignment]

    def setup_optimizer(self) -> None:
        """Optimizers with the checkpoint's state, schedules at its step."""
        self.optimizers = self.optimizer_of()
        warmup, total = speculators_trainer._resolve_scheduler_steps(
            self.config._replace(scheduler_total_steps=sum(self.steps)), len(self.order)
        )
        self.schedulers = schedule.schedulers(
            self.optimizers, self.config.scheduler_type, warmup, total, self.global_step
        )
        if self.course.resume_from is not None:
            training_state.load_optimizers(self.model, self.optimizers, self.course.resume_from)

    def optimizer_of(self) -> Sequence[Any]:
        """The optimizers, their groups at the peak learning rate."""
        return compute.optimizers(self.model, self.config)

    # An epoch

    def run_training(self) -> None:
        """Trains what no checkpoint holds yet; a line of metrics says how much that is in all.

        Raises Interrupted after a SIGTERM, the position saved; StageFailed when weights or figures are not finite.
        """
        devices = dist.get_world_size() if self.is_distributed else 1
        course = {"steps": sum(self.steps), "epochs": self.config.num_epochs, "devices": devices}
        speculators_trainer.metric_logger.info({"training": course})
        try:
            while self.position.epoch < self.config.num_epochs and not self.ended():
                epoch = self.position.epoch
                self.train_epoch(epoch)
                self._publish_epoch(epoch, self.evaluate(epoch))
        except Interrupted:
            if self.position.step:
                self._publish_inside()
            raise

    def ended(self) -> bool:
        """Whether training is complete, by what the finished epochs' checkpoints hold: the same on every rank."""
        found = selection.lengths(Path(self.config.save_path))
        return self.course.interruption.anywhere(selection.over(found, self.config.num_epochs, self.course.patience))

    def train_epoch(self, epoch: int, *, step_callback: Any = None) -> None:
        """Trains the steps of an epoch that are not done."""
        self.model.train()
        self.order.start(epoch, self.position.step)
        began = time.perf_counter()
        for batch in self.train_loader:
            self.timer.reset(self.global_step % self.config.log_freq == 0)
            self.timer.mark_value("start", began)
            self.timer.mark("queue")
            self.train_step(epoch, batch)
            began = self.timer.now() or time.perf_counter()
            self.global_step += 1
            self.position = Position(epoch, self.position.step + 1)
            if self._checkpoint_due():
                self._publish_inside()
        self.guard.check()

    def train_step(self, epoch: int, batch: dict[str, Any]) -> None:
        """Forward, backward, a change of the weights, and every `log_freq` steps a line of metrics."""
        self.timer.mark("pre_h2d")
        inputs = self.to_device(batch)
        with torch.autocast(self.device_type, dtype=self.config.hidden_states_dtype):
            self.timer.mark("fetch")
            _, loss, metrics = self.model(**inputs, **(self.config.train_call_kwargs or {}))
        self.timer.mark("fwd")
        self._optimizers_zero_grad()
        loss.backward()
        self.timer.mark("pre_clip")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.timer.mark("bwd")
        rates = {type(optimizer).__name__: optimizer.param_groups[0]["lr"] for optimizer in self.optimizers}
        if guards.learns(batch["loss_mask"], inputs["loss_mask"]):
            self.guard.see(epoch, self.position.step, self.global_step, loss, norm)
            self.step(loss, metrics)
        else:
            self._skip(epoch)
        self._schedulers_step()
        self.timer.mark("opt")
        if self.timer.enabled:
            self._log_step(epoch, inputs, metrics, rates)

    def to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The model's arguments from a loader's batch."""
        batch.pop(RECOVERY_METADATA_KEY, None)
        return {
            key: value.to(self.local_rank, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for key, value in batch.items()
        }

    def step(self, loss: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> None:
        """Changes the weights by the gradients of a step with this loss."""
        self._optimizers_step()

    def _skip(self, epoch: int) -> None:
        """Leaves the weights as they are, and a line of metrics that names the rows without a supervised token."""
        self._optimizers_zero_grad()
        line = {"skipped": {"rows": self.rows_of(epoch, self.position.step)}, "epoch": epoch}
        speculators_trainer.metric_logger.info({**line, "global_step": self.global_step})

    def _log_step(
        self, epoch: int, inputs: Mapping[str, Any], metrics: dict[str, torch.Tensor], rates: dict[str, float]
    ) -> None:
        tokens = int((inputs["document_ids"] != -1).sum().item())
        profile = self.timer.profile(tokens)
        if self.is_distributed:
            metrics = speculators_trainer._all_reduce_metrics(metrics)
        world = dist.get_world_size() if self.is_distributed else 1
        figures = normalize_counted_metrics({name: value.item() for name, value in metrics.items()}, world)
        line = {
            "train": figures,
            "profile": profile,
            "epoch": epoch,
            "lr": rates if len(rates) > 1 else next(iter(rates.values())),
            "global_step": self.global_step,
        }
        speculators_trainer.metric_logger.info(line, extra={"step": self.global_step})

    def evaluate(self, epoch: int) -> dict[str, Any]:
        """The figures of a trained epoch, as JSON files of its checkpoint by name."""
        metrics = self.val_epoch(epoch) or {}
        if wrong := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            raise StageFailed(f"epoch {epoch}: validation metric {wrong[0]} is not finite; lower drafter.learning_rate")
        replayed = self.course.replay(self.model)
        line = {"replay": validation_replay.flat(replayed), "epoch": epoch}
        speculators_trainer.metric_logger.info(line, extra={"step": self.global_step})
        return {checkpoints.METRICS: metrics, checkpoints.REPLAY: replayed}

    # Checkpoints

    def _checkpoint_due(self) -> bool:
        every, at = self.course.checkpoint_steps, self.position
        return every is not None and at.step % every == 0 and at.step < self.steps[at.epoch]

    def _publish_inside(self) -> None:
        if not (Path(self.config.save_path) / self.position.name).exists():
            self._publish({}, whole=False)

    def _publish_epoch(self, epoch: int, figures: dict[str, Any]) -> None:
        self.position = Position(epoch + 1)
        self._publish(figures, whole=True)

    def _publish(self, figures: dict[str, Any], whole: bool) -> None:
        """Makes the checkpoint of the position, all ranks together; those that it replaces go."""
        self.guard.check()
        self._refuse_what_is_not_finite()
        folder, at = Path(self.config.save_path), self.position
        temporary = folder / checkpoints.temporary_name(at.name) if self.rank == 0 else None
        if temporary is not None:
            temporary.mkdir()
        files = training_state.write(temporary, self.model, self.optimizers, whole)
        if temporary is not None:
            state = {
                "epoch": at.epoch - 1 if whole else at.epoch,
                "local_step": at.step,  # speculators: 0 when the epoch is finished
                "global_step": self.global_step,
                "next_epoch": at.epoch,
                "next_step": at.step,
                "steps": self.steps,
            }
            for name, value in {checkpoints.STATE: state, **figures}.items():
                (temporary / name).write_text(json.dumps(value, allow_nan=False, indent=2) + "\n")
            checkpoints.seal(temporary, files)
            self.course.before_publishing()
            checkpoints.publish(folder, at.name)
            checkpoints.settle(folder, at)
        if self.is_distributed:
            dist.barrier()

    def _refuse_what_is_not_finite(self) -> None:
        wrong = next(
            (
                name
                for name, value in training_state.trained(self.model).items()
                if not bool(torch.isfinite(getattr(value, "_local_tensor", value)).all())
            ),
            None,
        )
        if self.course.interruption.anywhere(wrong is not None):
            at = self.position
            where = f"{wrong or 'a weight on another device'} holds NaN or infinity"
            raise StageFailed(f"epoch {at.epoch}, step {at.step}: {where}; lower drafter.learning_rate")
