"""The metrics file of a training: one JSON object a line, every step once, however often training was interrupted.

A line of a training step has `train`, `epoch`, `lr` and `global_step` (steps done before it); a line of an epoch has
`val` and `epoch`.  A checkpoint is published only when the lines before it are on the disk (`JsonLines.sync`), and a
process that continues from it first takes away the lines of what it trains again (`cut`): so no step is missing and
none stands twice.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream import atomic

FILE = "metrics.jsonl"


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

    def sync(self) -> None:
        """Returns when every line is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse(line: bytes) -> dict[str, Any]:
    """A line of metrics, empty when a kill cut it."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a metrics file, none without one."""
    if path.exists():
        yield from (row for line in path.read_bytes().splitlines() if (row := parse(line)))


def cut(path: Path, epoch: int, global_step: int) -> None:
    """Takes away what a training that continues at this epoch (0-based) and step logs again, and half lines.

    A line with `global_step` stays if that is smaller; one without, if its `epoch` is.
    """
    if not path.exists():
        return
    with atomic.replacing(path) as temporary, temporary.open("wb") as file:
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n") and (row := parse(line)) and _before(row, epoch, global_step):
                file.write(line)


def _before(row: dict[str, Any], epoch: int, global_step: int) -> bool:
    if "global_step" in row:
        return bool(row["global_step"] < global_step)
    return bool(row.get("epoch", -1) < epoch)
