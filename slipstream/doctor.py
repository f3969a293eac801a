"""Whether this machine can do what the project asks of it, and what to do where it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from slipstream.plan import free_bytes, gpus_here

VERSIONS = (
    "import importlib.metadata as m, json, sys;"
    "json.dump({d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()"
    " if d.metadata['Name']}, sys.stdout)"
)


@dataclass(frozen=True)
class Finding:
    """One line of the examination; `advice` is empty when all is well."""

    what: str
    state: str
    advice: str = ""


def pins(lock: Path) -> dict[str, str]:
    """name -> version of a lock file."""
    lines = [line.strip() for line in lock.read_text().splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def installed(python: Path) -> dict[str, str]:
    """name -> version (without the local part) of an environment."""
    output = subprocess.run([str(python), "-c", VERSIONS], check=True, capture_output=True, text=True).stdout
    return {name: version.split("+")[0] for name, version in json.loads(output).items()}


def environment(name: str, python: Path, lock: Path) -> Finding:
    """Compares one environment with its lock."""
    if not python.exists():
        return Finding(name, f"{python} is missing", "run `make install`")
    if not lock.exists():
        return Finding(name, f"{lock} is missing", "start from the repository's root")
    have, want = installed(python), pins(lock)
    wrong = [f"{p} {have.get(p, 'missing')} (pinned {v})" for p, v in want.items() if have.get(p) != v]
    if wrong:
        return Finding(
            name, f"{len(wrong)} of {len(want)} packages differ: {', '.join(wrong[:3])}", "run `make install`"
        )
    return Finding(name, f"{len(want)} packages as pinned")


def examine(root: Path, workdir: Path) -> list[Finding]:
    """All findings for the repository in `root`."""
    gpus = gpus_here()
    lock = "gpu.lock" if gpus else "cpu.lock"
    findings = [
        environment("orchestrate and train", Path(sys.executable), root / "infra/train" / lock),
        environment("serve", root / ".venv-serve/bin/python", root / "infra/serve" / lock),
    ]
    findings.append(Finding("GPUs", f"{gpus} here" if gpus else "none here: servers and training run on the CPU"))
    free = free_bytes(workdir)
    advice = "" if free > 10e9 else "free some space or set SLIPSTREAM_WORKDIR to another disk"
    findings.append(Finding("disk", f"{free / 1e9:.0f} GB free for {workdir}", advice))
    return findings
