"""The exports of the full pocket run: both forms served by vLLM accept alike; the card says what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from slipstream import cli, serving
from slipstream.acceptance.served import measure
from slipstream.artifact import open_artifact
from slipstream.config import load_config
from slipstream.traces import prompt_set, splits
from tests.conftest import ROOT, Run

pytestmark = [pytest.mark.serve, pytest.mark.pocket, pytest.mark.timeout(2400)]


def served_alike(flat: dict, outputs: Path, drafter: Path, prompts: Path, work: Path) -> None:
    """Serves `drafter` on the held-out prompts; per position within 0.02 of the figures `flat`, outputs the same."""
    config = load_config(ROOT / "deployments/pocket.yaml")
    asked = list(prompt_set.load(open_artifact(prompts), splits.HELD_OUT))
    spec = serving.speculative_server(drafter, config.acceptance.draft_tokens)
    cache = serving.cache_folder(config.servers, work)
    with serving.serve(config.verifier, config.servers, spec, work / "speculators.log", cache) as endpoint:
        measured = measure(endpoint, asked, config.acceptance, config.verifier, lambda: None)
    assert measured.counters.rate_per_position == pytest.approx(flat["acceptance_per_position"], abs=0.02)
    rows = pq.read_table(outputs).to_pylist()
    before = {(row["key"], row["turn"]): row["output_ids"] for row in rows if row["variant"] == "speculative"}
    after = {
        (prompt.key, trace.turn): list(trace.output_ids)
        for prompt, turns in zip(asked, measured.conversations, strict=True)
        for trace in turns
    }
    assert after == before


def test_vllm_accepts_as_much_of_the_speculators_form_as_of_the_flat_form(pocket_run: Run, tmp_path: Path) -> None:
    """The run's acceptance was measured with the flat form of the same weights, in float32."""
    latest = pocket_run.workdir / "runs" / "latest"
    best = (latest / "drafter" / "best").resolve()
    flat = pocket_run.report["acceptance"]
    outputs = latest / "acceptance" / "outputs.parquet"
    served_alike(flat, outputs, best / "speculators", (latest / "prompts").resolve(), tmp_path)


def test_the_card_of_an_export_holds_the_runs_figures(
    pocket_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_WORKDIR", str(pocket_run.workdir))
    monkeypatch.setattr(sys, "argv", ["slipstream", "export", "latest", "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    report = pocket_run.report
    assert f"{report['mean_accepted_length']:.6g}" in card
    assert f"| verdict | {report['verdict']}: " in card
    assert str(pocket_run.workdir) not in card
    assert str(ROOT) not in card
    counts = report["stages"]["features"]["counts"]
    assert f"| training rows | {counts['train']:,} |" in card
    served = json.loads((tmp_path / "out" / "config.json").read_text())
    assert served["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
