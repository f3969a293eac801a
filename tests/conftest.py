"""Shared by all tests: offline, nothing outside temporary folders, and one run each of smoke and pocket a session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", DO_NOT_TRACK="1", PREFECT_SERVER_ANALYTICS_ENABLED="false"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first in one process; what takes long first with several, the full pocket run before all."""
    order = {"unit": 0, "contract": 1, "crash": 2, "e2e": 3}
    several = "PYTEST_XDIST_WORKER" in os.environ
    items.sort(key=lambda item: order.get(item.path.relative_to(ROOT / "tests").parts[0], 9), reverse=several)
    if several:
        items.sort(key=lambda item: item.get_closest_marker("pocket") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Every file stays with one worker, and the files that share the full pocket run with one.

    (pytest-xdist 3.8 has groups for this, which pytest 9.2 does not let it name.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", maxsplit=1)[0]
            return "pocket" if file.startswith("tests/e2e/test_pocket") else file

    return ByFile(config, log)


@dataclass(frozen=True)
class Run:
    """A finished (or killed) `slipstream run`."""

    config: Path
    workdir: Path
    returncode: int
    output: str
    seconds: float

    @property
    def report(self) -> dict[str, Any]:
        """The run's report.json, through runs/latest as a user would open it."""
        report: dict[str, Any] = json.loads((self.workdir / "runs" / "latest" / "report.json").read_text())
        return report

    def executed(self) -> list[str]:
        """The stages that this run made itself."""
        return [name for name, entry in self.report["stages"].items() if entry["executed"]]


def start(config: Path, workdir: Path) -> subprocess.Popen[str]:
    """Starts `slipstream run CONFIG` in the repository's root."""
    env = {**os.environ, "SLIPSTREAM_WORKDIR": str(workdir)}
    env.pop("PREFECT_API_URL", None)
    command = [sys.executable, "-m", "slipstream.cli", "run", str(config)]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], config: Path, workdir: Path, started: float) -> Run:
    """Waits for a started run."""
    output, _ = process.communicate()
    return Run(config, workdir, process.returncode, output, time.monotonic() - started)


def run(config: Path, workdir: Path) -> Run:
    """Runs `slipstream run CONFIG` to its end; a failure shows the output."""
    started = time.monotonic()
    done = finish(start(config, workdir), config, workdir, started)
    assert done.returncode == 0, done.output[-6000:]
    return done


def variant(source: str, target: Path, **changes: Any) -> Path:
    """Writes deployments/<source>.yaml with `section__key=value` changes to `target`."""
    values = yaml.safe_load((ROOT / "deployments" / f"{source}.yaml").read_text())
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            values[section][key] = value
        else:
            values[section] = value
    target.write_text(yaml.safe_dump(values))
    return target


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """deployments/smoke.yaml from nothing, once a session.  Its prompts are a copy that tests may edit."""
    folder = tmp_path_factory.mktemp("smoke")
    prompts = folder / "prompts.jsonl"
    prompts.write_bytes((ROOT / "deployments/prompts/smoke.jsonl").read_bytes())
    return run(variant("smoke", folder / "smoke.yaml", prompts__sources=[{"path": str(prompts)}]), folder / "work")


@pytest.fixture(scope="session")
def pocket_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """deployments/pocket.yaml as it is, from nothing, once a session: what claims of quality rest on."""
    return run(ROOT / "deployments" / "pocket.yaml", tmp_path_factory.mktemp("pocket") / "work")
