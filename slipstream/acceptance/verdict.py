"""What the figures mean, in one sentence."""

from __future__ import annotations

from typing import Any


def verdict(figures: dict[str, Any]) -> tuple[str, str]:
    """("accepted" or "rejected", the reason) for the figures of an acceptance artifact.

    A drafter is accepted when it makes the server faster and changes no greedy output.  Outputs are
    compared strictly only in float32: in bfloat16 near-ties flip between two batch sizes of one server.
    """
    speed_up = figures["speed_up"]
    length = figures["mean_accepted_length"]
    if length is None:
        return "rejected", "the server drafted nothing: the drafter was not used"
    if not figures["outputs_identical"] and figures["dtype"] == "float32":
        return "rejected", f"{figures['outputs_different']} greedy outputs differ with speculation on: serving is wrong"
    measured = f"{length:.2f} tokens a step, {speed_up:.2f}x the speed without it"
    return ("accepted" if speed_up > 1 else "rejected"), measured
