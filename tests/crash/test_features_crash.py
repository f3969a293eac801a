"""Capture killed, cut off from its server, out of disk: the finished store is that of an undisturbed run.

A stub server stands for vLLM, its states follow from the token ids; `benchmarks/crash_features.py` does the same with
the pocket verifier, a real vLLM server and the flow's tasks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
import yaml
from safetensors.numpy import load_file

from slipstream.artifact import Artifact, claim, open_artifact
from slipstream.features.capture import AWAITED
from slipstream.features.extraction import process_name
from tests.conftest import ROOT, variant

sys.path.insert(0, str(ROOT / "tests"))
from stub_server import Capture, StubServer, states_of

HIDDEN, ROWS, CONCURRENCY = 128, 40, 4
IN_FLIGHT = AWAITED * CONCURRENCY  # asked and not in the pool: waiting for an answer, or for the file
DEADLINE_S = 60


def rows() -> list[dict[str, Any]]:
    made = []
    for i in range(ROWS):
        ids = [200 + i, *range(1, 30 + i % 7)]
        mask = [0] + [1] * (len(ids) - 1)
        split = "train" if i < ROWS * 3 // 4 else "validation"
        made.append({"key": f"k{i:03d}", "input_ids": ids, "loss_mask": mask, "prompt_tokens": 1, "split": split})
    return made


class Driver:
    """The process that forks a run of the stage for every order."""

    def __init__(self, folder: Path) -> None:
        self.errors = folder / "driver.log"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "tests/crash/features_driver.py")]
        with self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
            )
        self.running: int | None = None
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self, config: Path, traces: Path) -> int:
        """Begins a run; its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{config} {traces}\n")
        self._process.stdin.flush()
        self.running = int(self._line())
        assert self.running > 1, self.running  # kill of 0 is one of ourselves
        return self.running

    def end(self) -> int:
        """Waits for the run's end; its status as os.waitpid gives it."""
        status = int(self._line())
        self.running = None
        return status

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(20)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    made = Driver(tmp_path_factory.mktemp("driver"))
    yield made
    made.close()


@pytest.fixture
def stub(driver: Driver) -> Iterator[StubServer]:
    with StubServer(hidden=HIDDEN) as server:
        server.on_capture(lambda tokens, number: Capture(delay_s=0.02, write_delay_s=0.01))
        yield server
    if driver.running is not None:  # a test that failed meanwhile
        with suppress(ProcessLookupError):
            os.kill(driver.running, signal.SIGKILL)
        driver.end()


class Stage:
    """One work directory: its configuration, its traces, what lies in it."""

    def __init__(self, work: Path, stub: StubServer, driver: Driver, storage: Path | None = None) -> None:
        self.work, self.stub, self.driver = work, stub, driver
        stub.storage = storage or stub.storage
        self.traces = self._traces()
        self.config = variant("smoke", work.parent / f"{work.name}.yaml", workdir=str(work))
        values = yaml.safe_load(self.config.read_text())
        values["verifier"]["path"] = str(ROOT / values["verifier"]["path"])
        values["servers"] |= {"features_endpoints": [stub.url], "features_storage": str(stub.storage)}
        values["features"] |= {"concurrency": CONCURRENCY, "shards": 3, "disk_reserve_gib": 0, "max_attempts": 1}
        values["features"] |= {"probe_samples": 0, "probe_all_layers": False}
        self.config.write_text(yaml.safe_dump(values))

    def _traces(self) -> Artifact:
        content = xxhash.xxh3_128(repr(rows()).encode()).hexdigest()
        with claim(self.work, "traces", content) as folder:
            pq.write_table(pa.Table.from_pylist(rows()), folder.path / "traces.parquet")
            return folder.commit(version=1, recipe={}, inputs={}, content=content, files=["traces.parquet"])

    def start(self) -> int:
        return self.driver.start(self.config, self.traces.folder)

    def finish(self) -> Artifact:
        """Runs to the end; the store."""
        self.start()
        return self.finished()

    def finished(self) -> Artifact:
        assert self.driver.end() == 0, self.driver.errors.read_text()[-3000:]
        (folder,) = self.work.glob("features/*")
        return open_artifact(folder)

    def kill_when(self, reached: Callable[[], bool]) -> None:
        """Starts a run and kills it with -9 as soon as `reached()`."""
        child = self.start()
        self.wait(reached)
        os.kill(child, signal.SIGKILL)
        assert self.driver.end() == signal.SIGKILL, "it ended before it could be killed"

    @staticmethod
    def wait(reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not reached():
            assert time.monotonic() < deadline, "not reached in time"
            time.sleep(0.002)

    def files(self) -> list[Path]:
        """Samples under their final names."""
        return list(self.work.glob("pool/features/*/??/*.safetensors"))

    def assert_no_half_file(self) -> None:
        """Whatever has a final name holds all of its states, right ones."""
        for path in self.files():
            held = load_file(path)
            assert np.array_equal(held["hidden_states"], states_of(held["token_ids"].tolist(), 4, HIDDEN)), path

    def asked(self) -> Counter[int]:
        """How often each row was asked for."""
        bodies = self.stub.asked("/v1/completions")
        return Counter(body["prompt"][0] - 200 for body in bodies if len(body["prompt"]) > 1)

    def assert_equals(self, reference: tuple[str, dict[str, bytes]]) -> None:
        """Content and the bytes of every file of states are those of the undisturbed run, and nothing else is left."""
        (folder,) = self.work.glob("features/*")
        store = open_artifact(folder)
        assert (store.content, contents(store)) == reference
        assert store.verify(deep=True) == []
        self.assert_no_half_file()
        assert [*self.work.rglob("*.tmp"), *self.work.rglob(".dataset-*")] == []
        assert list(self.work.glob("pool/features/incoming/*")) == []
        assert [path for path in self.stub.storage.iterdir() if "slipstream" in path.name] == []


def contents(store: Artifact) -> dict[str, bytes]:
    """The bytes of every hs file."""
    return {path.name: path.read_bytes() for path in (store.folder / "hidden_states").iterdir()}


@pytest.fixture(scope="module")
def reference(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, bytes]]:
    """Content and files of an undisturbed run."""
    with StubServer(hidden=HIDDEN) as server:
        stage = Stage(tmp_path_factory.mktemp("reference") / "work", server, driver)
        store = stage.finish()
        assert sorted(stage.asked().values()) == [1] * ROWS
        made = contents(store)
        assert len(made) == ROWS
        return store.content, made


def test_kill_9_at_several_instants(
    tmp_path: Path, stub: StubServer, driver: Driver, reference: tuple[str, dict[str, bytes]]
) -> None:
    stage = Stage(tmp_path / "work", stub, driver)
    instants: list[Callable[[], bool]] = [
        lambda: len(stage.files()) >= 1,
        lambda: len(stage.files()) >= 13,
        lambda: len(stage.files()) >= 30,
        lambda: len(list(stage.work.glob("feature-shards/*/index.parquet"))) == 3,
        lambda: len(list(stage.work.glob("features/*/hidden_states/*"))) >= 5,
        lambda: len(list(stage.work.glob("features/*/.dataset-*/*.arrow"))) >= 1,
    ]
    for reached in instants:
        stage.kill_when(reached)
        stage.assert_no_half_file()
    stage.finish()
    stage.assert_equals(reference)
    asked = stage.asked()
    assert len(asked) == ROWS
    assert sum(asked.values()) - ROWS <= 3 * IN_FLIGHT  # in flight at the kills that hit the capture


def test_a_server_that_goes_away_and_comes_back(
    tmp_path: Path, stub: StubServer, driver: Driver, reference: tuple[str, dict[str, bytes]]
) -> None:
    stage = Stage(tmp_path / "work", stub, driver)
    stage.start()
    for count in (5, 25):
        stage.wait(lambda count=count: len(stage.files()) >= count)
        stub.away()
        threading.Timer(1.0, stub.back).start()
    stage.finished()
    stage.assert_equals(reference)
    assert sum(stage.asked().values()) - ROWS <= 2 * IN_FLIGHT


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A tmpfs of 6 MiB; skips where it cannot be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(filler: Path) -> None:
    """Takes all the room that is left."""
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


@pytest.mark.parametrize("where", ["the server's disk", "both, and a kill"])
def test_a_full_disk(
    tmp_path: Path, stub: StubServer, driver: Driver, reference: tuple[str, dict[str, bytes]], where: str
) -> None:
    with small_disk(tmp_path / "small") as small:
        work = tmp_path / "work" if where == "the server's disk" else small / "work"
        storage = small / "storage"
        storage.mkdir()
        stage = Stage(work, stub, driver, storage)
        filler = small / "filler"

        def decide(tokens: list[int], number: int) -> Capture:
            if number == 16:
                fill(filler)
            return Capture(delay_s=0.05, write_delay_s=0.05)

        stub.on_capture(decide)
        child = stage.start()
        stage.wait(lambda: len(stub.requests) > 16 and filler.exists())
        held = 0
        while held < (held := len(stage.files())):
            time.sleep(0.7)
        assert held < ROWS, "it went on without room"
        if where == "both, and a kill":
            os.kill(child, signal.SIGKILL)
            assert driver.end() == signal.SIGKILL
            stage.assert_no_half_file()
            filler.unlink()
            stage.finish()
        else:
            filler.unlink()
            stage.finished()
        stage.assert_equals(reference)
        assert max(stage.asked().values()) <= 4
        for manifest in stage.work.glob("feature-shards/*/manifest.json"):
            assert open_artifact(manifest.parent).manifest().counts["lost"] == 0


def test_what_a_killed_client_never_fetched_is_gone_afterwards(
    tmp_path: Path, stub: StubServer, driver: Driver, reference: tuple[str, dict[str, bytes]]
) -> None:
    """The server writes the file after its client is dead; the next run knows whose it was."""
    stage = Stage(tmp_path / "work", stub, driver)
    stub.on_capture(lambda tokens, number: Capture(write_delay_s=0.3))
    stage.kill_when(lambda: len(stub.requests) > 8)
    time.sleep(0.5)
    mine = process_name().rpartition("-")[0]
    assert [path for path in stub.storage.iterdir() if mine in path.name]
    stage.finish()
    stage.assert_equals(reference)
