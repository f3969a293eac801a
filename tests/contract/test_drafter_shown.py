"""What Prefect shows of a training, read back through its API: progress in steps, the page after every epoch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from slipstream.artifact import Artifact, claim
from slipstream.drafter import stage
from slipstream.drafter.follower import Follower
from slipstream.progress import Report
from tasks.drafter import train
from tests.contract.capturing import configuration
from tests.contract.test_features_shown import shown
from tests.unit.drafter.test_history import LINES, REPLAYED

pytestmark = pytest.mark.usefixtures("results")


def append(folder: Path, *lines: Any) -> None:
    """As the training process does."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def replayed(folder: Path, epoch: int, length: float) -> None:
    (folder / "checkpoints" / str(epoch)).mkdir(parents=True)
    figures = REPLAYED | {"accepted_length": length}
    (folder / "checkpoints" / str(epoch) / "replay.json").write_text(json.dumps(figures))


def test_steps_and_a_page_that_grows_with_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path / "work", {}, shards=1)
    pages: list[str] = []

    def run(
        workdir: Path,
        config: Any,
        features: Any,
        vocabulary: Any,
        report: Report,
        on_wait: Any,
        on_epoch: Callable[[Path], None],
    ) -> Artifact:
        """The stage, its training written by hand."""
        with claim(workdir, "drafter", "k") as folder:
            follower = Follower(folder.path / "metrics.jsonl", report)
            append(folder.path, *LINES[:5])
            follower.poll()
            replayed(folder.path, 0, 1.9)
            on_epoch(folder.path)
            pages.append(shown("drafter-training")["drafter-training"].data)
            append(folder.path, *LINES[5:])
            follower.poll()
            replayed(folder.path, 1, 2.1)
            on_epoch(folder.path)
            pages.append(shown("drafter-training")["drafter-training"].data)
            lengths = {"0": 1.9, "1": 2.1}
            counts = {"best_epoch": "1", "accepted_length": lengths}
            return folder.commit(version=1, recipe={}, inputs={}, content="c", files=["metrics.jsonl"], counts=counts)

    monkeypatch.setattr(stage, "run", run)
    monkeypatch.setattr(stage, "key", lambda *_: "k")
    none = Artifact(path=str(tmp_path), stage="s", key="k", content="c")
    flow(persist_result=False)(lambda: train(config, none, none))()

    assert "| **0 (best)** | 3.0000 | 1.5000 |" in pages[0]
    assert "| 1 |" not in pages[0]
    assert "| 0 | 3.0000 |" in pages[1]
    assert "| **1 (best)** | 1.0000 | 1.2500 |" in pages[1]
    artifacts = shown("drafter-training", "drafter-progress", "drafter-epoch-1")
    assert artifacts["drafter-training"].data == pages[1]
    assert "data:image/png;base64," in pages[1]
    assert len(pages[1]) < 100_000
    progress = artifacts["drafter-progress"]
    assert progress.data == 90.0
    assert "9 of 10 steps, epoch 1, loss 1.0000, accuracy 0.60/0.40" in progress.description
    assert "tokens/s 50" in progress.description
    assert "validation loss 1.2500" in progress.description
