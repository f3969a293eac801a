"""A training that was interrupted ends as the undisturbed one: bits, learning rates, steps; on one process and on two.

The tolerance is none.  On a CPU every operation of a step has one order of summation for a number of threads; two ranks
add two gradients, which commutes.  (More than two ranks may sum a bucket's pieces in another order after a restart,
because DDP regroups its buckets after the first step: rounding of the last bit.)
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.artifact import Artifact
from slipstream.drafter import checkpoints, failure
from slipstream.drafter.job import Job
from slipstream.drafter.loaders import loaders
from slipstream.errors import Damaged, TransientError
from tests import training
from tests.unit.features.test_store import Runner, rows_of

FILES = ("model.safetensors", "optimizer.state")
FORWARD, VALIDATION = "before the backward pass", "in validation"
PEAK = training.DRAFTER["learning_rate"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """One work directory for all."""
    with training.runner(tmp_path_factory.mktemp("resume")) as runner:
        yield runner


@pytest.fixture(scope="module")
def made(run: Runner) -> tuple[Artifact, Artifact]:
    """A store of 24 training rows and 8 for validation."""
    return training.inputs(run, rows_of(32))


@pytest.fixture(scope="module")
def driver() -> Iterator[training.Driver]:
    """One for all."""
    with training.driver() as started:
        yield started


def assert_same(left: Path, right: Path, epochs: int) -> None:
    """Two jobs ended with the same weights, moments and lines of metrics."""
    assert training.steps(left) == training.steps(right)
    assert training.validations(left) == training.validations(right)
    for file in FILES:
        one, other = (job.parent / "checkpoints" / str(epochs - 1) / file for job in (left, right))
        assert one.read_bytes() == other.read_bytes(), file


def linear(step: int, warmup: int, total: int) -> float:
    """The learning rate of a linear schedule with warm-up, as a share of its peak."""
    return step / warmup if step < warmup else (total - step) / (total - warmup)


@pytest.mark.parametrize("world", [1, 2])
def test_the_learning_rate_after_resume_is_that_of_an_undisturbed_run(
    run: Runner, driver: training.Driver, world: int
) -> None:
    """Field report 43: eight samples, four epochs, linear warm-up, stopped after the first epoch."""
    made = training.inputs(run, rows_of(10, first=50))
    assert made[0].manifest().counts["train"] == 8
    options: dict[str, Any] = {"epochs": 4, "scheduler": "linear", "warmup_ratio": 0.5}
    whole = training.job(run, made, f"43-whole-{world}", **options)
    stopped = training.job(run, made, f"43-stopped-{world}", **options)
    assert driver.train(whole, world) == [0] * world
    lines = training.steps(whole)
    first = next(step for epoch, step, _, _ in lines if epoch == 1)
    assert driver.train(stopped, world, at=(first, FORWARD)) == [-9] * world
    assert [path.name for path in (stopped.parent / "checkpoints").glob("[0-9]*")] == ["0"]
    weights = [path.name for path in (stopped.parent / "checkpoints" / "0").glob("*.safetensors")]
    assert weights == ["model.safetensors"]  # who loads a folder loads no moments
    assert driver.train(stopped, world) == [0] * world
    assert_same(stopped, whole, 4)
    total = len(lines)
    assert [step for _, step, _, _ in lines] == list(range(total))
    expected = [PEAK * linear(step, total // 2, total) for step in range(total)]
    assert [rate for _, _, rate, _ in training.steps(stopped)] == pytest.approx(expected)


def test_both_schedules_of_muon_continue_inside_an_epoch(
    run: Runner, made: tuple[Artifact, Artifact], driver: training.Driver
) -> None:
    options: dict[str, Any] = {"epochs": 2, "optimizer": "muon", "checkpoint_steps": 1, "warmup_ratio": 0.25}
    whole, stopped = (training.job(run, made, f"muon-{name}", **options) for name in ("whole", "stopped"))
    assert driver.train(whole) == [0]
    assert driver.train(stopped, at=(2, FORWARD)) == [-9]
    assert (stopped.parent / "checkpoints" / "0-step-2").is_dir()
    assert driver.train(stopped) == [0]
    assert_same(stopped, whole, 2)
    rates = [rate for _, _, rate, _ in training.steps(stopped)]
    total = len(rates)
    warmup = total // 4
    shares = [
        step / warmup if step < warmup else (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
        for step in range(total)
    ]
    assert [rate["Muon"] for rate in rates] == pytest.approx([0.02 * share for share in shares])
    assert [rate["AdamW"] for rate in rates] == pytest.approx([PEAK * share for share in shares])


def test_sharded_weights_and_moments_are_written_whole_and_cut_again(
    run: Runner, made: tuple[Artifact, Artifact], driver: training.Driver
) -> None:
    """FSDP: the checkpoint is that of one process, and a resumed run its undisturbed one."""
    options: dict[str, Any] = {"epochs": 2, "distributed": "fsdp", "checkpoint_steps": 1}
    whole, stopped = (training.job(run, made, f"fsdp-{name}", **options) for name in ("whole", "stopped"))
    ddp = training.job(run, made, "ddp", **options | {"distributed": "ddp"})
    assert driver.train(whole, 2) == [0, 0]
    assert driver.train(stopped, 2, at=(1, FORWARD)) == [-9, -9]
    assert (stopped.parent / "checkpoints" / "0-step-1").is_dir()
    assert driver.train(stopped, 2) == [0, 0]
    assert_same(stopped, whole, 2)
    assert driver.train(ddp, 2) == [0, 0]
    for file in FILES:
        sharded, full = (load_file(job.parent / "checkpoints" / "1" / file) for job in (whole, ddp))
        assert sharded.keys() == full.keys()
        for name, value in full.items():  # the norm of the gradient is summed shard by shard
            torch.testing.assert_close(sharded[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", [FORWARD, VALIDATION])
def test_sigterm_saves_the_position(
    run: Runner, made: tuple[Artifact, Artifact], driver: training.Driver, where: str
) -> None:
    """No checkpoint inside an epoch was asked for; the status says that the training is to be continued."""
    names = ("whole", "stopped")
    whole, stopped = (training.job(run, made, f"term-{where}-{name}", epochs=1) for name in names)
    assert driver.train(whole) == [0]
    left = "0-step-2" if where == FORWARD else f"0-step-{len(training.steps(whole))}"
    assert driver.train(stopped, at=(1 if where == FORWARD else 0, where), number=signal.SIGTERM) == [143]
    folder = stopped.parent / "checkpoints"
    assert [path.name for path in folder.glob("[0-9]*")] == [left]
    assert sorted(path.name for path in (folder / left).iterdir()) == [
        "optimizer.state",
        "record.json",
        "trained.safetensors",
        "training_state.json",
    ]
    assert isinstance(failure.take(stopped.parent), TransientError)
    assert driver.train(stopped) == [0]
    assert_same(stopped, whole, 1)
    assert [path.name for path in folder.glob("[0-9]*")] == ["0"]


def test_all_ranks_stop_before_the_same_step_when_one_is_asked(
    run: Runner, made: tuple[Artifact, Artifact], driver: training.Driver
) -> None:
    whole, stopped = (training.job(run, made, f"one-rank-{name}", epochs=2) for name in ("whole", "stopped"))
    assert driver.train(whole, 2) == [0, 0]
    assert driver.train(stopped, 2, at=(0, FORWARD), number=signal.SIGTERM, ranks=[1]) == [143, 143]
    assert checkpoints.newest(stopped.parent / "checkpoints") == stopped.parent / "checkpoints" / "0-step-1"
    assert driver.train(stopped, 2) == [0, 0]
    assert_same(stopped, whole, 2)


def test_a_checkpoint_that_a_power_loss_cut_is_passed_over(
    run: Runner, made: tuple[Artifact, Artifact], driver: training.Driver
) -> None:
    """The one before it is taken, the file is named in the log, and the end is the same."""
    whole, cut = (training.job(run, made, f"cut-{name}", epochs=2, checkpoint_steps=3) for name in ("whole", "cut"))
    assert driver.train(whole) == [0]
    second = next(step for epoch, step, _, _ in training.steps(whole) if epoch == 1)
    assert driver.train(cut, at=(second + 4, FORWARD)) == [-9]
    file = cut.parent / "checkpoints" / "1-step-3" / "optimizer.state"
    file.write_bytes(file.read_bytes()[:-64])
    assert driver.train(cut) == [0]
    assert str(file) in (cut.parent / "driver.log").read_text()
    assert_same(cut, whole, 2)
    assert sorted(path.name for path in (cut.parent / "checkpoints").glob("[0-9]*")) == ["0", "1"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_reads_nothing_of_what_it_skips(
    run: Runner, made: tuple[Artifact, Artifact], workers: int
) -> None:
    """The files of the skipped batches are empty while the others are read."""
    store, words = training.inputs(run, rows_of(16, first=100 + 20 * workers))
    job = Job.load(training.job(run, (store, words), f"skip-{workers}", num_workers=workers))
    train, _ = loaders(job, 3, torch.float32)
    if workers:
        train.multiprocessing_context = "fork"  # no imports
    train.order.start(1, 0)
    every = list(train)
    skipped = 2
    train.order.start(1, skipped)
    before = [int(row) for batch in list(train.order._sampler)[:skipped] for row in batch]
    for row in before:
        (store.folder / "hidden_states" / f"hs_{row}.safetensors").write_bytes(b"")
    rest = list(train)
    assert len(before) > 0
    assert len(rest) == len(every) - skipped > 0
    for mine, theirs in zip(rest, every[skipped:], strict=True):
        assert all(torch.equal(mine[key], value) for key, value in theirs.items() if isinstance(value, torch.Tensor))
    train.order.start(1, 0)
    with pytest.raises(Damaged):
        next(iter(train))
    del train  # and its workers
