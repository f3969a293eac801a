"""Runs prompts and traces in one work directory against one stub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from stub_server import StubServer

from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.progress import Progress, silent
from slipstream.serving import Endpoint
from slipstream.traces import prompt_set, stage


class Runner:
    """Runs the two stages; `replicas` are further servers."""

    def __init__(self, stub: StubServer, make: Callable[..., RunConfig], write: Callable[..., str], root: Path) -> None:
        self.stub, self._make, self._write, self.root = stub, make, write, root
        self.entered = 0
        self.replicas: list[StubServer] = []

    @contextmanager
    def servers(self, logs: Path) -> Iterator[Sequence[Endpoint]]:
        """The stub and its further replicas."""
        self.entered += 1
        yield [Endpoint(server.url, "stub") for server in (self.stub, *self.replicas)]

    def config(self, rows: list[Any], verifier: dict[str, Any] | None = None, **traces: Any) -> RunConfig:
        """A configuration for these rows."""
        prompts = {"sources": [{"path": self._write(rows)}]}
        return self._make(prompts=prompts, traces=traces, verifier=verifier or {})

    def prompts(self, rows: list[Any]) -> Artifact:
        """The prompt set of these rows."""
        return prompt_set.run(self.root, self.config(rows).prompts)

    def __call__(
        self,
        rows: list[Any],
        report: Callable[[Progress], None] = silent,
        verifier: dict[str, Any] | None = None,
        **traces: Any,
    ) -> Artifact:
        config = self.config(rows, verifier, **traces)
        return stage.run(self.root, config, prompt_set.run(self.root, config.prompts), self.servers, report)

    def at(self, root: Path) -> Runner:
        """The same in another work directory."""
        return Runner(self.stub, self._make, self._write, root)

    def traced(self, rows: list[Any]) -> list[str]:
        """The texts that are traced (train and validation), in the artifact's order."""
        made = self.prompts(rows)
        parts = [prompt_set.load(made, part) for part in ("train", "validation")]
        return [prompt.messages[-1]["content"] for part in parts for prompt in part]


@pytest.fixture
def run(
    stub: StubServer,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., str],
    tmp_path: Path,
    no_pictures: None,
) -> Runner:
    """A runner in the test's own work directory."""
    return Runner(stub, make_config, write_prompts, tmp_path / "work")


def rows_of(artifact: Artifact) -> list[dict[str, Any]]:
    """All rows of traces.parquet."""
    rows: list[dict[str, Any]] = pq.read_table(artifact.folder / "traces.parquet").to_pylist()
    return rows


def rejects_of(folder: Path) -> list[dict[str, Any]]:
    """All rows of rejects.jsonl."""
    return [json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]


def summary_of(artifact: Artifact) -> dict[str, Any]:
    """The artifact's summary.json."""
    summary: dict[str, Any] = json.loads((artifact.folder / "summary.json").read_text())
    return summary
