"""Options and guards in whole trainings by the real worker, on a store of a few rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stub_server import StubServer

from slipstream import vocabulary
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.drafter import failure, metrics_file, page, stage
from slipstream.progress import Progress
from tests.conftest import ROOT
from tests.unit.drafter.test_reading import DRAFTER
from tests.unit.features.test_store import HIDDEN, Runner

ATTEMPTS = """
import os, sys
from pathlib import Path
os.environ["TQDM_DISABLE"] = "1"
from slipstream.drafter.worker import attempt, logging
for job in sys.argv[1:]:
    attempt(Path(job))
    logging.getLogger("speculators.metrics").handlers.clear()
"""
PLAIN = DRAFTER | {"sequence_length": 16, "scheduler": "none"}


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A stub that writes states as wide as the pocket verifier's."""
    with StubServer(hidden=HIDDEN) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path, stub: StubServer, make_config: Any) -> Runner:
    """Traces and stores in the test's own work directory."""
    return Runner(tmp_path / "work", stub, make_config)


def row(number: int, split: str, supervised: bool = True) -> dict[str, Any]:
    """Ten tokens, so that no two rows share a step of sixteen."""
    ids = [200 + number, *range(1 + number, 10 + number)]
    mask = [0, *[int(supervised)] * 9]
    return {"key": f"k{number}", "input_ids": ids, "loss_mask": mask, "prompt_tokens": 1, "split": split}


def prepared(run: Runner, folder: Path, rows: list[dict[str, Any]], **drafter: Any) -> Path:
    """The job of a training of these rows, for the worker."""
    config, made = run.make(drafter=PLAIN | drafter), run(rows)
    words = vocabulary.run(run.root, config, run.traces(rows))
    folder.mkdir()
    (folder / "job.json").write_text(stage._job(folder, config, made, words, None).model_dump_json())
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the checkpoint after the first epoch."""
    return load_file(folder / "checkpoints" / "0" / "model.safetensors")


def test_steps_that_teach_nothing_or_go_wrong(run: Runner, tmp_path: Path) -> None:
    """Field report 46, and weights that are no numbers any more: three trainings in one process."""
    normal, empty, validation = row(0, "train"), row(1, "train", supervised=False), row(2, "validation")
    both = prepared(run, tmp_path / "both", [normal, empty, validation])
    alone = prepared(run, tmp_path / "alone", [normal, validation])
    wild = prepared(run, tmp_path / "wild", [normal, row(3, "train"), validation], learning_rate=1e30)
    jobs = [str(folder / "job.json") for folder in (both, alone, wild)]
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, *jobs], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]

    lines = list(metrics_file.read(both / metrics_file.FILE))
    assert [line["training"] for line in lines if "training" in line] == [{"steps": 2, "epochs": 1, "devices": 1}]
    (skipped,) = (line for line in lines if "skipped" in line)
    assert skipped["skipped"] == {"rows": [1]}
    trained = {line["global_step"]: line["train"]["loss"] for line in lines if "train" in line}
    assert trained.keys() == {0, 1}
    assert trained[skipped["global_step"]] == 0.0
    assert trained[1 - skipped["global_step"]] > 0.1
    left, right = weights(both), weights(alone)
    assert all(value.isfinite().all() for value in left.values() if value.is_floating_point())
    # a step of AdamW without a gradient would move them: by its momentum, or by its weight decay
    assert all(torch.equal(left[name], right[name]) for name in right)

    error = failure.take(wild)
    assert error is not None
    assert str(error).startswith("epoch 0, step 1, rows ")
    assert "of the features: the loss is nan" in str(error)
    assert not (wild / "checkpoints" / "0").exists()


def test_options_reach_training_and_everything_is_shown(run: Runner) -> None:
    """A sum of losses, Muon, noise; two epochs seen from the stage."""
    rows = [row(number, "train" if number < 4 else "validation") for number in range(6)]
    config: RunConfig = run.make(
        drafter=PLAIN
        | {
            "epochs": 2,
            "loss_weights": {"ce": 0.25, "tv": 0.75},
            "optimizer": "muon",
            "muon_learning_rate": 0.004,
            "noise": 0.1,
        }
    )
    reports: list[Progress] = []
    pages: list[str] = []
    words = vocabulary.run(run.root, config, run.traces(rows))
    made: Artifact = stage.run(
        run.root, config, run(rows), words, reports.append, None, lambda folder: pages.append(page.markdown(folder))
    )
    lines = [line for line in metrics_file.read(made.folder / metrics_file.FILE) if "train" in line]
    assert len(lines) == 8
    for line in lines:
        assert line["lr"] == {"Muon": 0.004, "AdamW": 1e-3}
        figures = line["train"]
        total = sum(0.25 * figures[f"ce_loss_{step}"] + 0.75 * figures[f"tv_loss_{step}"] for step in range(3))
        assert figures["loss"] == pytest.approx(total, rel=1e-5)
    assert [report.total for report in reports] == [8] * len(reports)
    assert reports[-1].unit == "steps"
    assert reports[-1].done == 8
    assert reports[-1].figures["lr"] == "Muon 0.004, AdamW 0.001"
    shown = {"epoch", "loss", "accuracy", "after right ones", "tokens/s", "validation loss"}
    assert shown <= reports[-1].figures.keys()
    assert "Muon 0.004, AdamW 0.001" in pages[-1]
    assert "training.png" in made.manifest().files
