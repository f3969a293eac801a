"""Results that took longer than CI has time for: their fields, and the thresholds that the project claims."""

from __future__ import annotations

import json
from typing import Any

from tests.conftest import ROOT


def result(name: str) -> dict[str, Any]:
    """A committed result."""
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return found


def test_traces_under_chaos() -> None:
    traces = result("traces")
    assert traces["prompts"] == 10_000
    assert traces["accepted"] + traces["rejected"] == traces["prompts"]
    assert traces["rejected"] == traces["chaos"]["requests_by_outcome"]["cut"]
    assert traces["asked_twice"] == 0
    assert (traces["chaos"]["neither"], traces["chaos"]["both"], traces["chaos"]["accepted_repeated"]) == (0, 0, 0)
    assert len(traces["chaos"]["killed_after_answers"]) == 3
    assert traces["chaos"]["absences"] >= 1


def test_traces_memory_and_speed() -> None:
    traces = result("traces")
    assert traces["memory_growth_mb"] < 50
    assert traces["requests_per_second_over_speculators"] >= 1
