"""An export of the full pocket run: its card says what was measured (`test_pocket_drafter` serves both forms)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from slipstream import cli
from tests.conftest import ROOT, Run

pytestmark = [pytest.mark.serve, pytest.mark.pocket, pytest.mark.timeout(2400)]


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
