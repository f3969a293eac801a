"""Orchestration on the smoke run: what is finished is reused, what is damaged or new is made, alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from slipstream.artifact import open_artifact
from slipstream.pocket import curriculum
from slipstream.traces import prompts, splits
from tests.conftest import Run, run

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1500)]
STAGES = ["prompts", "traces", "features", "vocabulary", "drafter", "acceptance"]


def test_a_fresh_run_makes_every_stage(smoke_run: Run) -> None:
    assert smoke_run.executed() == STAGES
    report = smoke_run.report
    for name in ("acceptance_rate", "mean_accepted_length", "acceptance_per_position", "outputs_identical"):
        assert name in report
    assert report["tokens_per_second"]["baseline"] > 0
    assert report["tokens_per_second"]["speculative"] > 0
    for entry in report["stages"].values():
        assert entry["seconds"] >= 0
        assert len(entry["digest"]) == 32
    last = [line for line in smoke_run.output.splitlines() if line.strip()][-8:]
    named = " ".join(last)
    assert all(word in named for word in ("acceptance rate", "mean accepted length", "speed-up", "report.html")), named
    assert Path(last[-1].split()[-1]).is_file() or "report.html" in named


def test_every_stage_folder_is_a_verified_artifact(smoke_run: Run) -> None:
    for name in STAGES:
        folder = smoke_run.workdir / "runs" / "latest" / name
        artifact = open_artifact(folder.resolve())
        assert artifact.stage == name
        assert artifact.verify(deep=True) == []


def test_no_server_is_left(smoke_run: Run) -> None:
    commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.parent.exists()]
    assert not [c for c in commands if str(smoke_run.workdir).encode() in c]


def test_the_same_run_again_executes_nothing(smoke_run: Run) -> None:
    again = run(smoke_run.config, smoke_run.workdir)
    assert again.executed() == []
    assert again.report["stages"]["traces"]["digest"] == smoke_run.report["stages"]["traces"]["digest"]
    assert "Cached" in again.output


def test_a_lost_sample_is_captured_again_alone(smoke_run: Run) -> None:
    before = smoke_run.report
    store = smoke_run.workdir / "runs" / "latest" / "features" / "hidden_states" / "hs_3.safetensors"
    content, inode = store.read_bytes(), store.stat().st_ino
    copies = [p for p in (smoke_run.workdir / "pool").rglob("*.safetensors") if p.stat().st_ino == inode]
    assert len(copies) == 1
    for path in (store, copies[0]):
        path.unlink()
    again = run(smoke_run.config, smoke_run.workdir)
    assert again.executed() == ["features"]
    assert again.report["stages"]["features"]["work"]["captured"] == 1
    assert again.report["stages"]["features"]["digest"] == before["stages"]["features"]["digest"]
    assert len(store.read_bytes()) == len(content)


def test_a_lost_link_is_made_again_from_the_pool(smoke_run: Run) -> None:
    store = smoke_run.workdir / "runs" / "latest" / "features" / "hidden_states" / "hs_2.safetensors"
    content = store.read_bytes()
    store.unlink()
    again = run(smoke_run.config, smoke_run.workdir)
    assert again.executed() == ["features"]
    assert again.report["stages"]["features"]["work"] == {"linked": 1, "captured": 0, "shards_executed": 0}
    assert store.read_bytes() == content


def _another_training_prompt() -> dict[str, object]:
    """A prompt outside the smoke set that falls into the training split of deployments/smoke.yaml."""
    rng = random.Random(99)
    while True:
        row = {"id": "added", "messages": [{"role": "user", "content": curriculum.sample("add", rng).prompt}]}
        if splits.position(prompts.parse(row), 0) > 0.9:
            return row


def test_one_more_prompt_costs_one_request_and_one_capture(smoke_run: Run) -> None:
    before = smoke_run.report["stages"]
    source = smoke_run.config.parent / "prompts.jsonl"
    original = source.read_bytes()
    lines = original.decode().splitlines()
    random.Random(1).shuffle(lines)  # order is nothing that a stage depends on
    source.write_text("\n".join([*lines, json.dumps(_another_training_prompt())]) + "\n")
    try:
        more = run(smoke_run.config, smoke_run.workdir)
    finally:
        source.write_bytes(original)
    stages = more.report["stages"]
    assert stages["traces"]["work"]["requested"] == 1
    assert stages["features"]["work"]["captured"] == 1
    assert stages["traces"]["counts"]["train"] == before["traces"]["counts"]["train"] + 1
    assert more.executed() == STAGES
    assert stages["drafter"]["digest"] != before["drafter"]["digest"]
