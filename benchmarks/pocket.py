"""Seconds of the pocket run by stage, and of the same run again: `python benchmarks/pocket.py`.

Writes benchmarks/results/pocket.json.  The work directory is a temporary one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIG = "deployments/pocket.yaml"


def timed_run(workdir: str) -> tuple[float, dict[str, Any]]:
    """Seconds on the wall of one `slipstream run`, and its report."""
    started = time.monotonic()
    command = [sys.executable, "-m", "slipstream.cli", "run", CONFIG]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "SLIPSTREAM_WORKDIR": workdir})
    seconds = time.monotonic() - started
    return seconds, json.loads((Path(workdir) / "runs" / "latest" / "report.json").read_text())


def main() -> None:
    with tempfile.TemporaryDirectory() as workdir:
        first, report = timed_run(workdir)
        again, second = timed_run(workdir)
    result = {
        "command": "python benchmarks/pocket.py",
        "cpus": os.cpu_count(),
        "first_run_s": round(first, 1),
        "second_run_s": round(again, 1),
        "second_over_first": round(again / first, 4),
        "executed_by_second": [name for name, entry in second["stages"].items() if entry["executed"]],
        "stages": {
            name: {"seconds": entry["seconds"], "counts": entry["counts"], "work": entry["work"]}
            for name, entry in report["stages"].items()
        },
        "acceptance": report["acceptance"],
    }
    (ROOT / "benchmarks/results").mkdir(exist_ok=True)
    (ROOT / "benchmarks/results/pocket.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
