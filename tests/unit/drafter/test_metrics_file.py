"""The metrics file of the training process."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafter import metrics_file
from slipstream.drafter.metrics_file import FILE, JsonLines, cut


def log(folder: Path, *messages: Any) -> None:
    """Sends messages through the handler."""
    handler = JsonLines(folder / FILE)
    for message in messages:
        handler.emit(logging.LogRecord("speculators.metrics", logging.INFO, "", 0, message, (), None))
    handler.close()


def strict(text: str) -> Any:
    """JSON without NaN and infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_one_object_a_line_and_nothing_but_metrics(tmp_path: Path) -> None:
    log(tmp_path, {"train": {"loss": 1.5}, "global_step": 3}, "a sentence", {"val": {"loss_epoch": 2.0}})
    lines = [strict(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [{key: value for key, value in line.items() if key != "time"} for line in lines] == [
        {"train": {"loss": 1.5}, "global_step": 3},
        {"val": {"loss_epoch": 2.0}},
    ]


def test_lines_are_strict_json_also_when_the_loss_is_not_a_number(tmp_path: Path) -> None:
    log(tmp_path, {"train": {"loss": float("nan"), "grad": float("inf")}, "global_step": 1})
    assert strict((tmp_path / FILE).read_text())["global_step"] == 1


def test_a_second_process_continues_the_file(tmp_path: Path) -> None:
    log(tmp_path, {"global_step": 1})
    log(tmp_path, {"global_step": 2})
    assert [row["global_step"] for row in metrics_file.read(tmp_path / FILE)] == [1, 2]


def test_a_line_that_a_kill_cut_is_skipped(tmp_path: Path) -> None:
    log(tmp_path, {"global_step": 1, "train": {"loss": 1.0}})
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text + '{"global_step": 2, "train": {"loss": 1.0}')
    assert [row["global_step"] for row in metrics_file.read(tmp_path / FILE)] == [1]
    assert list(metrics_file.read(tmp_path / "nowhere")) == []


def test_a_resumed_process_is_read_after_a_cut_line(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"global_step": 1}\n{"global_step": 2, "train": {"lo')
    log(tmp_path, {"global_step": 2}, {"global_step": 3})
    assert [row["global_step"] for row in metrics_file.read(tmp_path / FILE)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("epoch", "step", "kept"),
    [
        (0, 0, []),
        (0, 1, [("train", 0)]),
        (1, 2, [("train", 0), ("train", 1), ("val", 0)]),
        (1, 3, [("train", 0), ("train", 1), ("val", 0), ("train", 2)]),  # all of epoch 1 trained, not validated
        (2, 3, [("train", 0), ("train", 1), ("val", 0), ("train", 2), ("val", 1)]),
    ],
)
def test_what_is_trained_again_is_cut(tmp_path: Path, epoch: int, step: int, kept: list[tuple[str, int]]) -> None:
    """Three steps of two epochs, each validated, then a half line."""
    lines = [
        {"train": {}, "epoch": 0, "global_step": 0},
        {"train": {}, "epoch": 0, "global_step": 1},
        {"val": {}, "epoch": 0},
        {"train": {}, "epoch": 1, "global_step": 2},
        {"val": {}, "epoch": 1},
    ]
    log(tmp_path, *lines)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"train": {}, "epoch": 2, "glob')
    cut(tmp_path / FILE, epoch, step)
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [("train", row["global_step"]) if "train" in row else ("val", row["epoch"]) for row in rows] == kept


def test_there_may_be_nothing_to_cut(tmp_path: Path) -> None:
    cut(tmp_path / FILE, 0, 0)
    assert list(metrics_file.read(tmp_path / FILE)) == []
