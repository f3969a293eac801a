"""Shared fixtures: the repository's root, a small configuration, a stub server, prompts."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("unit", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("unit")

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "slipstream" / "pocket" / "verifier"
SMALL: dict[str, Any] = {
    "name": "unit",
    "prompts": {"sources": [{"path": "prompts.jsonl"}], "held_out_ratio": 0.2, "val_ratio": 0.2},
    "verifier": {"path": str(POCKET), "dtype": "float32", "max_model_len": 512},
    "servers": {"device": "cpu"},
    "traces": {"max_tokens": 16, "concurrency": 8, "request_timeout_s": 20, "max_attempts": 3},
    "features": {
        "layer_ids": [2, 3, 5],
        "concurrency": 8,
        "request_timeout_s": 20,
        "max_attempts": 1,
        "probe_samples": 0,
    },
    "vocabulary": {"size": 320},
    "drafter": {
        "shape": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 256},
        "devices": [],
    },
}


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk: these tests kill processes, not machines."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture
def values() -> dict[str, Any]:
    """A complete configuration as a mapping, to be changed at will."""
    return copy.deepcopy(SMALL)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Any]:
    """A RunConfig in which `section={...}` replaces single fields; the work directory is the test's own."""
    from slipstream.config import RunConfig

    def make(**changes: Any) -> RunConfig:
        merged = copy.deepcopy(SMALL) | {"workdir": str(tmp_path / "work")}
        for section, fields in changes.items():
            merged[section] = merged.get(section, {}) | fields if isinstance(fields, dict) else fields
        return RunConfig.model_validate(merged)

    return make


@pytest.fixture
def stub() -> Iterator[Any]:
    """A running stub server."""
    from stub_server import StubServer

    with StubServer() as server:
        yield server


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat requests are repeated without a pause."""
    from slipstream.traces import fleet

    monkeypatch.setattr(fleet.random, "uniform", lambda low, high: 0.0)


@pytest.fixture
def write_prompts(tmp_path: Path) -> Callable[..., str]:
    """Writes texts or rows as a JSONL file and returns its path."""

    def write(rows: list[Any], name: str = "prompts.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"prompt": row} if isinstance(row, str) else row) + "\n" for row in rows]
        path.write_text("".join(lines), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of traces without pictures, which take 0.3 s each."""
    from slipstream.traces import plots

    for picture in ("lengths", "throughput"):
        monkeypatch.setattr(plots, picture, lambda figures: None)
