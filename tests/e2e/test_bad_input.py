"""Bad input: one clear sentence, a non-zero exit, and no server was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, variant

CASES = {
    "unknown key": ({"traces__max_tokenz": 5}, ["traces.max_tokenz", "unknown key"]),
    "layer past the last": ({"features__layer_ids": [2, 3, 9]}, ["features.layer_ids", "9", "1 to 5"]),
    "final layer as auxiliary": ({"features__layer_ids": [2, 3, 6]}, ["features.layer_ids", "6", "by itself"]),
    "vocabulary too large": ({"vocabulary__size": 100_000}, ["vocabulary.size", "100000", "512"]),
    "no verifier": ({"verifier__path": "no/such/verifier"}, ["no/such/verifier", "verifier.path"]),
    "no prompt file": (
        {"prompts__sources": [{"path": "no/such/prompts.jsonl"}]},
        ["no/such/prompts.jsonl", "prompts.sources"],
    ),
    "no serve environment": ({"servers__python": "no/such/python"}, ["no/such/python", "make install"]),
    "too many GPUs": (
        {"servers__device": "cuda", "servers__gpus": 64, "servers__start_ahead": False},
        ["64 GPUs needed"],
    ),
    "no GPU left for a stream": (
        {
            "features__store": "none",
            "servers__device": "cuda",
            "servers__start_ahead": False,
            "drafter__devices": [0],
        },
        ["features.store none", "drafter.devices [0]", "servers.tensor_parallel"],
    ),
    "ahead on a GPU": ({"servers__device": "cuda"}, ["start_ahead", "device cpu"]),
}


def attempt(config: Path, workdir: Path) -> subprocess.CompletedProcess[str]:
    """`slipstream run` on a configuration that must be refused."""
    command = [sys.executable, "-m", "slipstream.cli", "run", str(config)]
    env = {**os.environ, "SLIPSTREAM_WORKDIR": str(workdir)}
    return subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def assert_one_sentence(done: subprocess.CompletedProcess[str], workdir: Path, words: list[str]) -> None:
    """Exit 2, one line on stderr that holds the words, nothing started."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert not list(workdir.rglob("*.log"))
    assert not (workdir / "prefect").exists()


@pytest.mark.parametrize("case", CASES)
def test_refused_before_anything_starts(case: str, tmp_path: Path) -> None:
    changes, words = CASES[case]
    config = variant("smoke", tmp_path / "config.yaml", **changes)
    assert_one_sentence(attempt(config, tmp_path / "work"), tmp_path / "work", words)


def test_unreadable_prompt_file(tmp_path: Path) -> None:
    broken = tmp_path / "prompts.parquet"
    broken.write_bytes(b"PAR1 this is not parquet")
    config = variant("smoke", tmp_path / "config.yaml", prompts__sources=[{"path": str(broken)}])
    assert_one_sentence(attempt(config, tmp_path / "work"), tmp_path / "work", [str(broken), "unreadable"])


def test_not_yaml(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("name: [unclosed\n")
    assert_one_sentence(attempt(config, tmp_path / "work"), tmp_path / "work", [str(config), "YAML"])


def test_missing_configuration(tmp_path: Path) -> None:
    missing = tmp_path / "nothing.yaml"
    assert_one_sentence(attempt(missing, tmp_path / "work"), tmp_path / "work", [str(missing), "cannot read"])
