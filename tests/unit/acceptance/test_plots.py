"""The pictures are PNG files, whatever was measured."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.acceptance import plots

PNG = b"\x89PNG\r\n\x1a\n"
RATES = {"acceptance_per_position": [0.8, 0.5, 0.2]}


@pytest.mark.parametrize(
    "figures",
    [
        RATES,
        RATES | {"untrained": {"acceptance_per_position": [0.1, 0.0, 0.0]}},
        RATES | {"untrained": {"acceptance_per_position": []}},
        {"acceptance_per_position": []},
    ],
    ids=["trained", "with floor", "floor drafted nothing", "drafted nothing"],
)
def test_acceptance(figures: dict[str, Any]) -> None:
    assert plots.acceptance(figures).startswith(PNG)


def test_speed() -> None:
    figures = {"tokens_per_second": {"baseline": 10.0, "speculative": 15.0}, "speed_up": 1.5}
    assert plots.speed(figures).startswith(PNG)
