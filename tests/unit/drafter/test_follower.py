"""What a person sees while training runs, from lines appended as the worker does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.drafter.follower import Follower
from slipstream.progress import Progress
from tests.unit.drafter.test_history import begun, trained, validated


class Seen:
    """A metrics file and the reports of its follower."""

    def __init__(self, path: Path) -> None:
        self.path, self.reports = path, list[Progress]()
        self.follower = Follower(path, self.reports.append)

    def append(self, *lines: Any) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def after(self, *lines: Any) -> Progress | None:
        """The report that these lines cause."""
        self.append(*lines)
        count = len(self.reports)
        self.follower.poll()
        return self.reports[-1] if len(self.reports) > count else None


def test_progress_is_in_steps_with_the_figures_that_matter(tmp_path: Path) -> None:
    seen = Seen(tmp_path / "metrics.jsonl")
    assert seen.after() is None
    assert seen.after(begun(steps=40, devices=2)) is None
    assert seen.after(trained(0, 0, 100.0), trained(10, 0, 105.0, 1.23456)) == Progress(
        11,
        40,
        "steps",
        {
            "epoch": 0,
            "loss": "1.2346",
            "accuracy": "0.60/0.40",
            "after right ones": "0.60/0.70",
            "lr": "3e-05",
            "tokens/s": "200",  # 50 tokens a step, two steps a second, two devices
        },
    )
    validation = seen.after(validated(0, 0.75))
    assert validation is not None
    assert (validation.done, validation.figures["validation loss"]) == (11, "0.7500")
    assert validation.figures["validation accuracy"] == "0.50/0.25"
    nextly = seen.after(trained(20, 1, 1000.0), trained(30, 1, 1005.0))
    assert nextly is not None
    assert nextly.figures["tokens/s"] == "200"  # validation took its time and is no training
    assert seen.after() is None


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    seen = Seen(tmp_path / "metrics.jsonl")
    line = {"skipped": {"rows": [3]}, "epoch": 0, "global_step": 1}
    report = seen.after(begun(), trained(0, 0, 1.0), line, line | {"global_step": 2}, trained(3, 0, 2.0))
    assert report is not None
    assert report.figures["without a supervised token"] == 2


def test_a_line_counts_when_it_is_whole(tmp_path: Path) -> None:
    seen = Seen(tmp_path / "metrics.jsonl")
    seen.append(begun())
    line = json.dumps(trained(3, 0, 1.0)) + "\n"
    seen.path.write_text(seen.path.read_text() + line[:40])
    seen.follower.poll()
    assert seen.reports == []
    seen.path.write_text(seen.path.read_text() + line[40:])
    seen.follower.poll()
    assert [report.done for report in seen.reports] == [4]


def test_a_resumed_process_continues_the_count_over_a_file_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = Seen(path)
    before.append(begun(), *(trained(step, 0, float(step)) for step in range(4)))
    resumed = Seen(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))  # what the resumed process trains again is gone
    report = resumed.after(begun(), trained(2, 0, 100.0))
    assert report is not None
    assert (report.done, report.total) == (3, 6)


def test_a_loss_that_is_no_number_is_text_and_flagged(tmp_path: Path) -> None:
    """Field report 64."""
    report = Seen(tmp_path / "metrics.jsonl").after(begun(), trained(0, 0, 1.0, "nan"))
    assert report is not None
    assert report.figures["loss"] == "nan"
    assert report.figures["NOT FINITE"] == "loss"
