"""What the figures mean."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.acceptance.verdict import verdict

GOOD: dict[str, Any] = {
    "speed_up": 1.6,
    "mean_accepted_length": 2.8,
    "outputs_identical": True,
    "outputs_different": 0,
    "dtype": "float32",
}


@pytest.mark.parametrize(
    ("changes", "word", "reason"),
    [
        ({}, "accepted", "2.80 tokens a step, 1.60x"),
        ({"speed_up": 1.0}, "rejected", "1.00x"),
        ({"speed_up": 0.66}, "rejected", "0.66x"),
        ({"mean_accepted_length": None}, "rejected", "drafted nothing"),
        ({"outputs_identical": False, "outputs_different": 3}, "rejected", "3 greedy outputs differ"),
        ({"outputs_identical": False, "outputs_different": 3, "dtype": "bfloat16"}, "accepted", "2.80 tokens"),
    ],
)
def test_verdict(changes: dict[str, Any], word: str, reason: str) -> None:
    said, why = verdict(GOOD | changes)
    assert said == word
    assert reason in why
