"""Trackers beside the metrics file: speculators' handlers for TensorBoard, Trackio, MLflow and Weights & Biases.

None of their packages is part of this project's environment: a person who wants one installs it.  A tracker that cannot
start ends the job before its first step; one that breaks later is left out, for a training of hours is worth more than
its curve elsewhere, and the metrics file has every line.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import InputError, StageFailed

FOLDER = "trackers"  # in the drafter's folder: TensorBoard's and wandb's files
LOGGER = "speculators.metrics"
_log = logging.getLogger(__name__)


def require(names: Iterable[str]) -> None:
    """Raises InputError when a tracker's package (they have the trackers' names) is not installed here."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"drafter.trackers: {name} is asked for, but the package {name} is not installed beside speculators; "
                f"run `pip install {name}` there or take it off the list"
            )


class Tracker(logging.Handler):
    """Hands figures on to a tracker until that fails."""

    def __init__(self, name: str, handler: logging.Handler) -> None:
        super().__init__()
        self._name, self._handler, self._lost = name, handler, False

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Starts the tracker by telling it the settings; raises StageFailed when it does not start."""
        record = logging.makeLogRecord({"msg": dict(settings), "hparams": True})
        try:
            self._handler.handle(record)
        except Exception as error:  # whatever a tracker's client raises
            raise StageFailed(
                f"drafter.trackers: {self._name} did not start ({' '.join(str(error).split())}); "
                "repair its settings or take it off the list"
            ) from error

    def emit(self, record: logging.LogRecord) -> None:
        """The figures of training, validation and replay; what tells of the process is for the metrics file."""
        if self._lost or not isinstance(record.msg, dict) or not record.msg.keys() & {"train", "val", "replay"}:
            return
        try:
            self._handler.handle(record)
        except Exception:
            self._lost = True
            _log.exception("%s failed; training goes on without it", self._name)

    def close(self) -> None:
        """Closes the tracker."""
        try:
            self._handler.close()
        except Exception:
            _log.exception("%s did not close", self._name)
        super().close()


def install(names: Sequence[str], folder: Path, run: str, settings: Mapping[str, Any]) -> None:
    """Gives speculators' metric logger these trackers alone; their files go below `folder`, their run is called `run`.

    To be called before other handlers are added: speculators' set-up closes all that exist.
    """
    if not names:
        return
    from speculators.train.logger import setup_metric_logger

    setup_metric_logger(list(names), run, str(folder / FOLDER))
    logger = logging.getLogger(LOGGER)
    handlers = list(logger.handlers)
    logger.handlers.clear()
    for name, handler in zip(names, handlers, strict=True):
        tracker = Tracker(name, handler)
        tracker.begin(settings)
        logger.addHandler(tracker)
