"""Stops an installation that would fetch a CUDA build of torch onto a host without a GPU.

    python infra/check_torch.py infra/train/cpu.lock

Asks pip what it would take for the lock's `torch==…` line.  A CPU build carries `+cpu` in its version; anything
else brings several GB of CUDA libraries, which no CPU run needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def would_take(requirement: str) -> str:
    """The version, local part included, of the torch that pip has or would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--no-deps", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), requirement], check=True)
        return str(json.loads(report.read_text())["install"][0]["metadata"]["version"])


def main() -> None:
    requirement = next(line for line in Path(sys.argv[1]).read_text().splitlines() if line.startswith("torch=="))
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return
    version = would_take(requirement)
    if not version.endswith("+cpu"):
        sys.exit(
            f"install: pip would fetch a CUDA build ({version}) for {requirement}, and this host has no GPU; "
            "let pip reach a CPU build (add PyTorch's own CPU wheel index as an extra index, see README) and run again"
        )


if __name__ == "__main__":
    main()
