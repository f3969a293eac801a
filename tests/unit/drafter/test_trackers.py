"""Trackers: speculators' own handlers, with TensorBoard's writer replaced; the metrics file whatever they do."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slipstream.drafter import trackers
from slipstream.errors import StageFailed


class Writer:
    """Stands for torch.utils.tensorboard.SummaryWriter, whose package is not installed."""

    made: ClassVar[list[Writer]] = []
    broken_from = 10**9

    def __init__(self, log_dir: Path) -> None:
        self.folder, self.scalars, self.settings, self.closed = Path(log_dir), dict[tuple[str, int], float](), {}, False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, global_step: int) -> None:
        if global_step >= self.broken_from:
            raise OSError("no space left")
        self.scalars[name, global_step] = value

    def add_text(self, name: str, value: str, global_step: int) -> None:
        raise AssertionError(f"{name} is text")

    def add_hparams(self, settings: dict[str, Any], metrics: Any, **_: Any) -> None:
        self.settings = settings

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self.closed = True


class Lines(logging.Handler):
    """Stands for the metrics file."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "train" in record.msg:
            self.steps.append(record.msg["global_step"])


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """speculators' metric logger, put back afterwards."""
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Writer, "made", [])
    monkeypatch.setattr(Writer, "broken_from", 10**9)
    used = logging.getLogger(trackers.LOGGER)
    before = list(used.handlers), list(used.filters), used.level, logging.getLogger("speculators").level
    yield used
    used.handlers, used.filters = before[0], before[1]
    used.setLevel(before[2])
    logging.getLogger("speculators").setLevel(before[3])


def log(logger: logging.Logger, step: int) -> None:
    """A line as the trainer logs it."""
    figures = {"train": {"loss": 1.5 - step / 10, "full_acc_0": 0.5}, "lr": 3e-5, "epoch": 0, "global_step": step}
    logger.info(figures, extra={"step": step})


def test_tensorboard_gets_every_figure_into_the_drafters_folder(tmp_path: Path, logger: logging.Logger) -> None:
    trackers.install(["tensorboard"], tmp_path, "slipstream-abc", {"learning_rate": 3e-5, "layers": [2, 3]})
    lines = Lines()
    logger.addHandler(lines)
    logger.info({"training": {"steps": 2}}, extra={"step": 0})
    for step in range(2):
        log(logger, step)
    logger.info({"replay": {"accepted_length": 1.9}, "epoch": 0}, extra={"step": 1})
    (writer,) = Writer.made
    assert writer.folder == tmp_path / "trackers" / "slipstream-abc"
    assert writer.settings == {"learning_rate": 3e-5, "layers": "[2, 3]"}
    assert writer.scalars["train/loss", 1] == 1.4
    assert writer.scalars["lr", 0] == 3e-5
    assert writer.scalars["replay/accepted_length", 1] == 1.9
    assert not [name for name, _ in writer.scalars if name.startswith("training")]
    assert lines.steps == [0, 1]
    logger.handlers[0].close()
    assert writer.closed


def test_a_tracker_that_breaks_is_left_out_and_the_metrics_file_goes_on(
    tmp_path: Path, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trackers.install(["tensorboard"], tmp_path, "run", {})
    lines = Lines()
    logger.addHandler(lines)
    monkeypatch.setattr(Writer, "broken_from", 1)
    for step in range(4):
        log(logger, step)
    assert lines.steps == [0, 1, 2, 3]
    assert {step for _, step in Writer.made[0].scalars} == {0}
    assert [record.message for record in caplog.records if "training goes on" in record.message] == [
        "tensorboard failed; training goes on without it"
    ]


def test_a_tracker_that_does_not_start_ends_the_job(
    tmp_path: Path, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(StageFailed, match=r"drafter.trackers: wandb did not start \(.*pip install wandb"):
        trackers.install(["wandb"], tmp_path, "run", {})


def test_no_tracker_leaves_the_logger_alone(tmp_path: Path, logger: logging.Logger) -> None:
    before = list(logger.handlers)
    trackers.install([], tmp_path, "run", {})
    assert logger.handlers == before
