"""The training process: `python -m slipstream.drafter.worker job.json`, under torchrun for several GPUs.

A process of its own because of its signal handlers, and because a trainer that dies must not take the flow along.
Killed at any instant and started again, it continues from the newest complete checkpoint; asked to end by SIGTERM, it
finishes its step, saves a checkpoint and ends with status 143.  Metrics go to `job.metrics` (`metrics_file`).  An error
that this project raises, and an interruption, is left beside the job (`failure`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slipstream import atomic
from slipstream.artifact import locked
from slipstream.drafter import (
    build,
    checkpoints,
    compute,
    failure,
    loaders,
    losses,
    metrics_file,
    replay_rows,
    trackers,
    training_state,
    validation_replay,
)
from slipstream.drafter.interruption import STATUS, Interrupted, Interruption, Watched
from slipstream.drafter.job import Job
from slipstream.drafter.peers import lost_peer
from slipstream.errors import SlipstreamError, StageFailed, TransientError


def _save_initial(model: Any, folder: Path, figures: dict[str, Any]) -> None:
    """The drafter as it was built, with the figures of its replay."""
    temporary = folder / checkpoints.temporary_name(checkpoints.INITIAL)
    temporary.mkdir()
    files = training_state.write(temporary, model, [], whole=True)
    atomic.write_json(temporary / checkpoints.REPLAY, figures)
    checkpoints.seal(temporary, files)
    checkpoints.publish(folder, checkpoints.INITIAL)


def _begin(job: Job) -> tuple[Path | None, bool]:
    """Clears what a killed process left.

    Gives the checkpoint from which training continues, None to begin anew, and whether the drafter as it is before
    training is still to be kept.
    """
    folder = Path(job.checkpoints)
    checkpoints.sweep(folder)
    newest = checkpoints.newest(folder)
    state = checkpoints.state(newest) if newest else {"next_epoch": 0, "global_step": 0}
    metrics_file.cut(Path(job.metrics), state["next_epoch"], state["global_step"])
    wanted = job.drafter.keep_initial or job.drafter.epochs == 0
    return newest, wanted and checkpoints.damage(folder / checkpoints.INITIAL) is not None


def _log_metrics(path: Path) -> metrics_file.JsonLines:
    """speculators' metric lines into the file."""
    lines = metrics_file.JsonLines(path)
    logger = logging.getLogger(trackers.LOGGER)
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    return lines


def _replay(job: Job, val_loader: Any, interruption: Interruption, device: str) -> Callable[[Any], dict[str, Any]]:
    """A model's figures on the validation rows that are replayed; all ranks call it together."""
    from speculators.train.distributed import get_rank, get_world_size

    config = job.drafter
    batches = Watched(replay_rows.loader(val_loader, job, get_rank(), get_world_size()), interruption)
    dtype = getattr(torch, config.compute_dtype)
    return lambda model: validation_replay.measure(model, batches, config.replay_tokens, device, dtype)


def _trainer(job: Job, model: Any, device: str, read: Sequence[Any], course: Any) -> Any:
    """The trainer of this rank over the loaders `read`, at the step where the checkpoint stands."""
    from speculators.train.trainer import TrainerConfig

    from slipstream.drafter import trainer as epochs

    config = job.drafter
    train_kwargs, val_kwargs = losses.call_arguments(type(model), config, device)
    settings = TrainerConfig(
        lr=config.learning_rate,
        num_epochs=config.epochs,
        save_path=job.checkpoints,
        train_call_kwargs=train_kwargs,
        val_call_kwargs=val_kwargs,
        optimizer=config.optimizer,
        muon_lr=config.muon_learning_rate,
        weight_decay=config.weight_decay,
        scheduler_type=config.scheduler,
        scheduler_warmup_ratio=config.warmup_ratio,
        hidden_states_dtype=getattr(torch, config.compute_dtype),
        log_freq=config.log_every,
        fsdp_shard=config.distributed == "fsdp",
    )
    return epochs.EpochTrainer(model, settings, read[0], read[1], device, course)


@contextmanager
def _alone(job: Job, rank: int) -> Iterator[None]:
    """While the first rank holds the checkpoints: a process that ends a lost flow's training may still be saving."""
    if rank:
        yield
        return
    with locked(Path(job.checkpoints) / ".lock"):
        yield


def main(path: Path) -> None:
    """Trains what the job says; raises Interrupted when it was asked to end and its position is saved."""
    from speculators.train.distributed import get_rank, maybe_destroy_distributed

    from slipstream.drafter import ranks

    job = Job.load(path)
    config = job.drafter
    device = "cuda" if config.devices else "cpu"
    if config.threads:
        torch.set_num_threads(config.threads)
    if device == "cpu":
        ranks.use_cpu()
    ranks.begin(device)
    with _alone(job, get_rank()):
        _train(job, device)
    maybe_destroy_distributed()


def _train(job: Job, device: str) -> None:
    from speculators.train.distributed import get_rank, is_distributed

    from slipstream.drafter.trainer import Course

    config = job.drafter
    decided = [_begin(job) if get_rank() == 0 else None]
    if is_distributed():
        torch.distributed.broadcast_object_list(decided)
    assert decided[0] is not None
    resume_from, keep_initial = decided[0]
    model = build.build(job, device)
    read = loaders.loaders(job, len(model.target_layer_ids), getattr(torch, config.compute_dtype))
    interruption = Interruption()
    interruption.install()
    replay = _replay(job, read[1], interruption, device)
    if keep_initial:
        figures = replay(model.to(device))
        if get_rank() == 0:
            _save_initial(model, Path(job.checkpoints), figures)
    compute.prepare(model, config)
    course = Course(
        resume_from,
        config.checkpoint_steps,
        interruption,
        config.max_loss_factor,
        replay,
        config.early_stop_patience,
    )
    if get_rank() == 0:
        artifact = Path(job.metrics).parent
        trackers.install(config.trackers, artifact, f"slipstream-{artifact.name[:12]}", config.model_dump(mode="json"))
        course = dataclasses.replace(course, before_publishing=_log_metrics(Path(job.metrics)).sync)
    _trainer(job, model, device, read, course).run_training()


def attempt(path: Path) -> int:
    """`main` as an exit status; what ended it is left beside the job and in the log."""
    try:
        main(path)
    except SlipstreamError as error:
        failure.record(path.parent, error)
        print(f"{type(error).__name__}: {failure.sentence(error)}", file=sys.stderr)
        return 1
    except Interrupted:
        sentence = f"{path.parent}: training was asked to end and saved its position; run again to continue it"
        failure.record(path.parent, TransientError(sentence))
        return STATUS
    except Exception as error:
        traceback.print_exc()
        if "LOCAL_RANK" in os.environ and not lost_peer(error):
            # left for the stage: torchrun's report does not tell what ended first from what that ended
            said = " ".join(str(error).split())[:500]
            failure.record(path.parent, StageFailed(f"{path.parent}: {type(error).__name__} in training: {said}"))
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    if status := attempt(Path(sys.argv[1])):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # waits for no data worker, which may wait for a server
