"""The figures of hidden states in one file: `python benchmarks/features.py` after the benchmarks that measure them.

Reads results/features_capture.json (a GPU), features_read.json and, when it is there, features_fp8.json; writes
results/features.json.  What was not measured is null.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FIGURES = {
    "features_capture": ("capture_over_connector", "capture_over_prefill", "capture_over_speculators"),
    "features_read": ("deep_verify_over_read", "loader_over_read", "loader_over_speculators", "fp8_bytes_over_bf16"),
    "features_fp8": ("fp8_accepted_length_over_bf16",),
}


def main() -> None:
    """Gathers and writes."""
    found: dict[str, Any] = {"command": "python benchmarks/features.py"}
    for name, figures in FIGURES.items():
        path = RESULTS / f"{name}.json"
        measured = json.loads(path.read_text()) if path.exists() else {}
        found |= {figure: measured.get(figure) for figure in figures}
    (RESULTS / "features.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
