"""The training process: `python -m slipstream.drafter.worker job.json`, under torchrun for several GPUs.

A process of its own because speculators installs signal handlers, and because a trainer that dies must not
take the flow along.  Killed at any instant and started again, it continues after the last finished epoch.
Metrics go to `job.metrics`, one JSON object a line, as speculators logs them.  An error that this project raises is
left beside the job (`failure`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from slipstream.drafter import build, checkpoints, failure, loaders
from slipstream.drafter.job import Job
from slipstream.errors import SlipstreamError


class JsonLines(logging.Handler):
    """Appends the dictionaries that speculators logs as metrics to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("a", buffering=1)
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")  # a kill cut the last line

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line of strict JSON: NaN and infinity become their names."""
        if isinstance(record.msg, dict):
            self._file.write(json.dumps(_strict({"time": time.time(), **record.msg}), allow_nan=False) + "\n")


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _save_initial(model: Any, folder: Path) -> None:
    if (folder / checkpoints.INITIAL).is_dir():
        return
    temporary = folder / checkpoints.temporary_name(checkpoints.INITIAL)
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    checkpoints.publish(folder, checkpoints.INITIAL)


def main(path: Path) -> None:
    """Trains what the job says."""
    from speculators.train.distributed import get_rank, maybe_destroy_distributed, maybe_setup_distributed
    from speculators.train.trainer import TrainerConfig

    from slipstream.drafter import trainer as epochs

    job = Job.load(path)
    config = job.drafter
    device = "cuda" if config.devices else "cpu"
    if config.threads:
        torch.set_num_threads(config.threads)
    if device == "cpu":
        epochs.use_cpu()
    maybe_setup_distributed()
    folder = Path(job.checkpoints)
    folder.mkdir(parents=True, exist_ok=True)
    if get_rank() == 0:
        checkpoints.sweep(folder)
    model = build.build(job, device)
    if get_rank() == 0 and (config.keep_initial or config.epochs == 0):
        _save_initial(model, folder)
    if get_rank() == 0:
        logger = logging.getLogger("speculators.metrics")
        logger.setLevel(logging.INFO)
        logger.addHandler(JsonLines(Path(job.metrics)))
    dtype = getattr(torch, config.compute_dtype)
    train_loader, val_loader = loaders.loaders(job, len(model.target_layer_ids), dtype)
    train_kwargs, val_kwargs = type(model).get_trainer_kwargs(
        loss_fn=config.loss,
        loss_implementation="eager" if device == "cpu" else "fused",  # fused needs Triton
        ttt_steps=config.ttt_steps,
        ttt_step_loss_decay=config.ttt_step_loss_decay,
    )
    trainer = epochs.EpochTrainer(
        model,
        TrainerConfig(
            lr=config.learning_rate,
            num_epochs=config.epochs,
            save_path=str(folder),
            resume_from_checkpoint=True,
            train_call_kwargs=train_kwargs,
            val_call_kwargs=val_kwargs,
            weight_decay=config.weight_decay,
            scheduler_type=config.scheduler,
            scheduler_warmup_ratio=config.warmup_ratio,
            hidden_states_dtype=dtype,
            log_freq=config.log_every,
        ),
        train_loader,
        val_loader,
        device,
    )
    trainer.run_training()
    maybe_destroy_distributed()


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    _job = Path(sys.argv[1])
    try:
        main(_job)
    except SlipstreamError as _error:
        failure.record(_job.parent, _error)
        sys.exit(f"{type(_error).__name__}: {failure.sentence(_error)}")
