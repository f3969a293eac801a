"""The metrics file of the training process."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from slipstream.drafter.stage import read_metrics
from slipstream.drafter.worker import JsonLines


def log(folder: Path, *messages: Any) -> None:
    """Sends messages through the handler."""
    handler = JsonLines(folder / "metrics.jsonl")
    for message in messages:
        handler.emit(logging.LogRecord("speculators.metrics", logging.INFO, "", 0, message, (), None))
    handler._file.close()


def strict(text: str) -> Any:
    """JSON without NaN and infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_one_object_a_line_and_nothing_but_metrics(tmp_path: Path) -> None:
    log(tmp_path, {"train": {"loss": 1.5}, "global_step": 3}, "a sentence", {"val": {"loss_epoch": 2.0}})
    lines = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [{key: value for key, value in line.items() if key != "time"} for line in lines] == [
        {"train": {"loss": 1.5}, "global_step": 3},
        {"val": {"loss_epoch": 2.0}},
    ]


def test_lines_are_strict_json_also_when_the_loss_is_not_a_number(tmp_path: Path) -> None:
    log(tmp_path, {"train": {"loss": float("nan"), "grad": float("inf")}, "global_step": 1})
    assert strict((tmp_path / "metrics.jsonl").read_text())["global_step"] == 1


def test_a_second_process_continues_the_file(tmp_path: Path) -> None:
    log(tmp_path, {"global_step": 1})
    log(tmp_path, {"global_step": 2})
    assert [row["global_step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_a_line_that_a_kill_cut_is_skipped(tmp_path: Path) -> None:
    log(tmp_path, {"global_step": 1, "train": {"loss": 1.0}})
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text + '{"global_step": 2, "train": {"loss": 1.0}')
    assert [row["global_step"] for row in read_metrics(tmp_path)] == [1]
    assert list(read_metrics(tmp_path / "nowhere")) == []


def test_a_resumed_process_is_read_after_a_cut_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"global_step": 1}\n{"global_step": 2, "train": {"lo')
    log(tmp_path, {"global_step": 2}, {"global_step": 3})
    assert [row["global_step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
