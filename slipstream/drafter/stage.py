"""The drafter stage: training in a child process, every epoch exported, the best one named.

drafter/<key>/
  checkpoints/           what training resumes from, see `checkpoints`
  epochs/<epoch>/        what servers load: `flat/` (vLLM, SGLang) and `speculators/` (vLLM), see `export`
  best                   link to the epoch with the longest accepted length on validation rows (`selection`)
  replay.json            each epoch's figures from its replay on validation rows
  metrics.jsonl, train.log, job.json, about.json
  warm_start.json        with `init_from`: what became of each of its tensors
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream import atomic, process, verifier
from slipstream.artifact import Artifact, checksum, claim, stage_key
from slipstream.config import RunConfig
from slipstream.digest import digest
from slipstream.drafter import (
    checkpoints,
    curves,
    failure,
    metrics_file,
    selection,
    trackers,
    warm_start,
    warm_start_check,
)
from slipstream.drafter.about import about
from slipstream.drafter.follower import Watch
from slipstream.drafter.job import Job
from slipstream.drafter.layer_config import require_trained_shape
from slipstream.drafter.refusals import require_usable
from slipstream.drafter.retention import Retention
from slipstream.drafter.shape import resolve
from slipstream.errors import StageFailed, TransientError
from slipstream.features import beside_training
from slipstream.features.complete import require_complete
from slipstream.features.lease import Lease
from slipstream.features.recipe import final_state_of, form
from slipstream.features.stream import Streaming, StreamServer
from slipstream.progress import Report

STAGE, VERSION = "drafter", 2
EPOCHS, CHECKPOINTS, BEST, FLAT = "epochs", "checkpoints", "best", "flat"
ABOUT = "about.json"  # what the model cards of all epochs say
CONFIG, WEIGHTS = "config.json", "model.safetensors"
SAVING_S = 60.0  # for a last checkpoint: 12 GB of trained weights and moments at Kimi-K2.5's width


def _recipe(config: RunConfig) -> dict[str, Any]:
    init = config.drafter.init_from
    weights = [checksum(p) for p in sorted(Path(init).glob("*.safetensors"))] if init else None
    return {
        **config.drafter.recipe(),
        "published": None,  # the shape is what counts
        "shape": resolve(config).recipe(),
        "init_from": weights,
        "device": "cuda" if config.drafter.devices else "cpu",
        "world_size": max(1, len(config.drafter.devices)),
        "export_dtype": config.verifier.dtype,
    }


def _inputs(config: RunConfig, features: Artifact, vocabulary: Artifact) -> dict[str, str]:
    return {
        "verifier": verifier.identity(config.verifier),
        "features": features.content,
        "vocabulary": vocabulary.content,
    }


def key(config: RunConfig, features: Artifact, vocabulary: Artifact) -> str:
    """The folder key for these inputs."""
    return stage_key(STAGE, VERSION, _recipe(config), _inputs(config, features, vocabulary))


def run(
    workdir: Path,
    config: RunConfig,
    features: Artifact,
    vocabulary: Artifact,
    report: Report,
    on_wait: Callable[[str], None] | None = None,
    on_epoch: Callable[[Path], None] | None = None,
) -> Artifact:
    """Trains the epochs that are not finished, exports each, picks the best by its replay.

    `on_epoch` is called with the drafter's folder after every epoch, its curves drawn, while training goes on.
    Raises Damaged when the feature store is incomplete or a sample is not as it was stored, before a step uses it;
    StageFailed when training ends early; TransientError when the training process was killed from outside or its
    stream of states broke off (what it finished stays finished); InputError when a stream has no GPU for its server
    or the drafter cannot start from `init_from` (`warm_start_check`).
    """
    recipe, inputs = _recipe(config), _inputs(config, features, vocabulary)
    name = stage_key(STAGE, VERSION, recipe, inputs)
    with claim(workdir, STAGE, name, on_wait) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        require_complete(features.folder)
        warm_start_check.of_run(config)
        require_usable(config, features)
        trackers.require(config.drafter.trackers)
        atomic.write_json(folder.path / ABOUT, about(config, features, vocabulary))
        store = folder.path / CHECKPOINTS
        retention = Retention(
            store, config.drafter.keep_checkpoints == "all", lambda name: export_epoch(folder.path, name, config)
        )
        checkpoints.sweep(folder.path / EPOCHS)
        _forgo(folder.path, config)
        before = checkpoints.finished_epochs(store)
        if not _complete(config, selection.lengths(store)) or not _initial_ready(config, store):
            with _states(workdir, config) as leases:
                job = _job(folder.path, config, features, vocabulary, leases)
                watch = Watch(folder.path, report, on_epoch)
                _train(folder.path, job, config, watch, leases or [], retention)
        lengths = selection.lengths(store)
        epochs = sorted(lengths)
        if epochs != list(range(len(epochs))) or not _complete(config, lengths):
            wanted = f"{config.drafter.epochs} epochs"
            raise StageFailed(f"{folder.path / 'train.log'}: training ended with epochs {epochs} instead of {wanted}")
        names = [checkpoints.INITIAL] if _initial_wanted(config) else []
        names += [str(epoch) for epoch in epochs]
        if _initial_wanted(config):
            export_epoch(folder.path, checkpoints.INITIAL, config)
        retention.poll()
        checkpoints.settle(store, checkpoints.Position(len(epochs)))  # a kill may have come before the worker's
        longest = selection.best(lengths)
        best = checkpoints.INITIAL if longest is None else str(longest)
        replays = {epoch_name: selection.figures(store, epoch_name) for epoch_name in names}
        atomic.write_json(folder.path / checkpoints.REPLAY, replays)
        atomic.point(folder.path / BEST, folder.path / EPOCHS / best)
        exported = [path for exported_name in names for path in (folder.path / EPOCHS / exported_name).rglob("*")]
        files = [str(path.relative_to(folder.path)) for path in sorted(exported) if path.is_file()]
        files += [str(p.relative_to(folder.path)) for p in sorted(store.glob("*/*")) if p.is_file()]
        made = ("job.json", ABOUT, metrics_file.FILE, curves.FILE, warm_start.FILE, checkpoints.REPLAY)
        files += [name for name in made if (folder.path / name).exists()]
        served = {
            epoch_name: [checksum(served_folder(folder.path, epoch_name) / file) for file in (CONFIG, WEIGHTS)]
            for epoch_name in names
        }
        return folder.commit(
            version=VERSION,
            recipe=recipe,
            inputs=inputs,
            content=digest([served[best], served.get(checkpoints.INITIAL)]),
            files=files,
            counts={
                "epochs": len(epochs),
                "best_epoch": best,
                "accepted_length": {name: round(found["accepted_length"], 4) for name, found in replays.items()},
                **parameter_counts(served_folder(folder.path, best) / WEIGHTS, config.drafter.train_lm_head),
            },
            work={"epochs_trained": len(epochs) - len(before), "epochs_reused": len(before)},
        )


def _complete(config: RunConfig, lengths: Mapping[int, float]) -> bool:
    """Whether the epochs with these accepted lengths are all that there will be."""
    return selection.over(lengths, config.drafter.epochs, config.drafter.early_stop_patience)


def _forgo(folder: Path, config: RunConfig) -> None:
    """Damage to a checkpoint that is needed no more, since its epoch is exported, costs no training."""
    from slipstream.drafter import export

    store = folder / CHECKPOINTS

    def over(epochs: Sequence[int]) -> bool:
        lengths = {epoch: selection.figures(store, str(epoch))["accepted_length"] for epoch in epochs}
        return epochs == list(range(len(epochs))) and _complete(config, lengths)

    checkpoints.forgo(store, lambda name: export.whole(folder / EPOCHS / name), over)


def _initial_wanted(config: RunConfig) -> bool:
    return config.drafter.keep_initial or config.drafter.epochs == 0


def _initial_ready(config: RunConfig, store: Path) -> bool:
    return not _initial_wanted(config) or checkpoints.damage(store / checkpoints.INITIAL) is None


@contextmanager
def _states(workdir: Path, config: RunConfig) -> Iterator[list[Lease] | None]:
    """The extraction servers of a training without a store; None with one."""
    if config.features.store != "none":
        yield None
        return
    with beside_training.serving_states(workdir, config) as leases:
        yield leases


def _streaming(config: RunConfig, leases: Sequence[Lease]) -> Streaming:
    wanted, looks = config.features, form(config)
    return Streaming(
        servers=[
            StreamServer(url=endpoint.url, model=endpoint.model, storage=str(lease.storage.absolute()))
            for lease in leases
            for endpoint in lease.endpoints
        ],
        layers=looks.layers,
        hidden=looks.hidden,
        dtype=looks.dtype,
        concurrency=wanted.concurrency,
        max_attempts=wanted.max_attempts,
        request_timeout_s=wanted.request_timeout_s,
    )


def _job(
    folder: Path, config: RunConfig, features: Artifact, vocabulary: Artifact, leases: Sequence[Lease] | None
) -> Job:
    shape = verifier.load_shape(config.verifier)
    manifest = features.manifest()
    counts = manifest.counts
    return Job(
        verifier=str(verifier.folder_of(config.verifier).absolute()),
        features=features.path,
        vocabulary=vocabulary.path,
        checkpoints=str(folder / CHECKPOINTS),
        metrics=str(folder / metrics_file.FILE),
        layer_ids=config.features.layer_ids,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        train_rows=counts["train"],
        rows=counts["rows"],
        final_state=final_state_of(manifest.recipe, features.path),
        shape=resolve(config),
        drafter=config.drafter,
        checked_reads=config.features.checked_reads,
        read_ahead=config.features.read_ahead,
        streaming=_streaming(config, leases) if leases is not None else None,
    )


def _command(job: Path, ranks: int) -> list[str]:
    """What trains, under torchrun when several do."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    return [sys.executable, "-m", *torchrun, "slipstream.drafter.worker", str(job)]


def _a_rank_was_killed(log: Path, begun: int) -> bool:
    """Whether torchrun, whose own status is 1 then, reports a kill -9.

    It kills ranks too, those that do not end after another one's error: but such an error has left its sentence.
    """
    with log.open("rb") as file:
        file.seek(begun)
        return re.search(rb"exitcode\s*:\s*-9\b", file.read()) is not None


def _train(
    folder: Path, job: Job, config: RunConfig, watch: Watch, leases: Sequence[Lease], retention: Retention
) -> None:
    path = folder / "job.json"
    atomic.write_bytes(path, job.model_dump_json(indent=2).encode())
    failure.take(folder)  # of an earlier attempt
    devices = config.drafter.devices
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    if not devices:
        env["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads beside any other load: 4,400 tokens/s became 120
    log = folder / "train.log"
    begun = log.stat().st_size if log.exists() else 0
    child = process.start(_command(path, len(devices)), log, env, grace_s=SAVING_S)
    try:
        while (status := child.returncode()) is None:
            watch.poll()
            retention.poll()
            if complaint := next(filter(None, (lease.complaint() for lease in leases)), None):
                raise TransientError(f"{complaint}; run again: training continues from its newest checkpoint")
            time.sleep(0.5)
        watch.poll()
    finally:
        child.stop()
    if status and (known := failure.take(folder)) is not None:
        raise known
    if status > 128 or (status and _a_rank_was_killed(log, begun)):
        raise TransientError(f"{child.log}: the training process was killed (status {status}): {child.complaint()}")
    if status:
        raise StageFailed(f"{child.log}: the training process failed with status {status}: {child.complaint()}")


def export_epoch(folder: Path, name: str, config: RunConfig) -> Path:
    """Exports an epoch whose checkpoint is complete, as `export.export_epoch` does.

    Raises StageFailed when the export describes another decoder than the one that was trained.
    """
    from slipstream.drafter import export

    exported = export.export_epoch(folder, name, config.verifier.dtype, config.drafter.export_embeddings)
    require_trained_shape(served_folder(folder, name) / CONFIG, resolve(config))
    return exported


def served_folder(folder: Path, name: str) -> Path:
    """What a server of either kind loads of an epoch."""
    return folder / EPOCHS / name / FLAT


def parameter_counts(path: Path, train_lm_head: bool) -> dict[str, int]:
    """How many parameters an exported drafter has, and how many of them training changed."""
    from safetensors import safe_open

    frozen = ("embed_tokens.", "d2t", "t2d") + (() if train_lm_head else ("lm_head.",))
    total = trained = 0
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            count = 1
            for size in file.get_slice(name).get_shape():
                count *= size
            if name not in ("d2t", "t2d"):
                total += count
                trained += 0 if name.startswith(frozen) else count
    return {"parameters": total, "trained_parameters": trained}
