"""What training reads: the same batches from a store and from servers; damage ends it before a step, in a sentence."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import httpx
import numpy as np
import pytest
import torch
from speculators.models.eagle3.data import shift_batch
from speculators.train.dataloader import create_train_val_loaders
from stub_server import Capture, StubServer

from slipstream import process, vocabulary
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.drafter import metrics_file, stage
from slipstream.drafter.job import Job
from slipstream.drafter.loaders import loaders
from slipstream.errors import Damaged, InputError, ServerError, StageFailed, TransientError
from slipstream.features import beside_training
from slipstream.features import store as features_store
from slipstream.features.lease import Lease
from slipstream.progress import silent
from tests.unit.features.test_store import HIDDEN, Runner, rows_of

ROWS = rows_of(12)
DRAFTER = {
    "epochs": 1,
    "compute_dtype": "float32",
    "sequence_length": 64,
    "num_workers": 0,
    "threads": 1,
    "log_every": 1,
    "learning_rate": 1e-3,
}


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A stub that writes states as wide as the pocket verifier's."""
    with StubServer(hidden=HIDDEN) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path, stub: StubServer, make_config: Callable[..., RunConfig]) -> Runner:
    """Traces and stores in the test's own work directory."""
    return Runner(tmp_path / "work", stub, make_config)


def named(stub: StubServer) -> dict[str, Any]:
    """Servers that a user names: the stub."""
    return {"device": "cpu", "features_endpoints": [stub.url], "features_storage": str(stub.storage)}


def job(config: RunConfig, made: Artifact, streaming: Any = None) -> Job:
    """A job without a vocabulary: enough for its loaders."""
    made_job = stage._job(Path("nowhere"), config, made, Artifact(path="v", stage="", key="", content=""), None)
    return made_job.model_copy(update={"streaming": streaming})


def batches(made: Job, epochs: int = 2) -> list[dict[str, Any]]:
    """Every batch of some epochs, training and validation."""
    found = []
    train, validation = loaders(made, 3, torch.float32)
    for epoch in range(epochs):
        train.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        found += [*train, *validation]
    return found


def assert_same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    """Bit for bit."""
    assert len(left) == len(right) > 0
    for mine, theirs in zip(left, right, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(mine[name], value) if isinstance(value, torch.Tensor) else mine[name] == value


def test_a_store_gives_speculators_own_batches(run: Runner) -> None:
    config, made = run.make(drafter=DRAFTER), run(ROWS)
    wanted = job(config, made)
    train, validation = create_train_val_loaders(
        data_path=made.path,
        total_seq_len=64,
        hidden_states_dtype=torch.float32,
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path="",
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=HIDDEN,
        num_target_layers=3,
        num_workers=0,
        prefetch_factor=4,
        preprocess=shift_batch,
        train_data_ratio=wanted.train_ratio,
        seed=config.drafter.seed,
    )
    theirs = []
    for epoch in range(2):
        train.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        theirs += [*train, *validation]
    assert_same(batches(wanted), theirs)


def test_a_stream_gives_the_batches_of_the_store_and_keeps_nothing(run: Runner, stub: StubServer) -> None:
    stored = batches(job(run.make(drafter=DRAFTER), run(ROWS)))
    config = run.make(drafter=DRAFTER, features={"store": "none"}, servers=named(stub))
    made = features_store.assemble(run.root, config, run.traces(ROWS), [])
    before = len(run.asked())
    with beside_training.serving_states(run.root, config) as leases:
        at_first = sorted(stub.storage.iterdir())  # what the question for readiness left
        streamed = batches(job(config, made, stage._streaming(config, leases)))
    assert_same(streamed, stored)
    asked = [ids for ids in run.asked()[before:] if len(ids) > 1]
    assert sorted(asked) == sorted([row["input_ids"] for row in ROWS] * 2)
    assert sorted(stub.storage.iterdir()) == at_first
    assert not (made.folder / "hidden_states").exists()


def failing(run: Runner, stub: StubServer, decide: Callable[[list[int], int], Capture]) -> None:
    """Reads all batches of a stream whose server answers as `decide` says."""
    config = run.make(
        drafter=DRAFTER, features={"store": "none", "max_attempts": 2, "request_timeout_s": 2}, servers=named(stub)
    )
    made = features_store.assemble(run.root, config, run.traces(ROWS), [])
    with beside_training.serving_states(run.root, config) as leases:
        stub.on_capture(decide)
        batches(job(config, made, stage._streaming(config, leases)), epochs=1)


def only(first: int, otherwise: Capture) -> Callable[[list[int], int], Capture]:
    """`otherwise` for the row that begins with this token."""
    return lambda tokens, number: otherwise if tokens[0] == first else Capture()


@pytest.mark.parametrize(
    ("capture", "kind", "words"),
    [
        (Capture(status=503), TransientError, r"row 3 of .*HTTP 503.* \(2 attempts\)"),
        (Capture(status=400), ServerError, "HTTP 400"),
        (Capture(tokens=[203, 9, 9, 9, 9, 9]), ServerError, r"row 3 of .*other tokens than the 6 asked for"),
    ],
)
def test_a_row_that_gets_no_states_ends_the_training(
    run: Runner, stub: StubServer, capture: Capture, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        failing(run, stub, only(203, capture))


def test_a_failure_that_passes_is_asked_again(run: Runner, stub: StubServer) -> None:
    seen: set[int] = set()

    def once(tokens: list[int], number: int) -> Capture:
        first = tokens[0] not in seen and tokens[0] % 3 == 0
        seen.add(tokens[0])
        return Capture(status=503) if first else Capture()

    failing(run, stub, once)


def test_rows_whose_input_ids_are_others_are_not_skipped(run: Runner) -> None:
    """speculators only warns, and trains on fewer rows."""
    made = run(ROWS)
    changed = datasets.load_from_disk(made.path)
    ids = [list(map(int, row)) for row in changed.with_format(None)["input_ids"]]
    ids[4][1] += 1
    other = changed.remove_columns("input_ids").add_column("input_ids", ids)
    wanted = job(run.make(drafter=DRAFTER), made)
    train, _ = loaders(wanted, 3, torch.float32)
    train.dataset._dataset.data = other.select(range(9)).with_format("torch")  # type: ignore[attr-defined]
    with pytest.raises(Damaged, match="row 4 are of other tokens than its input_ids"):
        list(train)


def trained(run: Runner, made: Artifact, config: RunConfig) -> Artifact:
    """The drafter stage in its own process."""
    words = vocabulary.run(run.root, config, run.traces(ROWS))
    return stage.run(run.root, config, made, words, silent)


def test_missing_files_fail_in_seconds_by_name_and_nothing_starts(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report 47: no request to anybody (there is no network), no step."""
    made = run(ROWS)
    for row in (2, 7):
        (made.folder / "hidden_states" / f"hs_{row}.safetensors").unlink()
    monkeypatch.setattr(process, "start", lambda *_, **__: pytest.fail("something was started"))
    began, asked, config = time.monotonic(), len(run.asked()), run.make(drafter=DRAFTER)
    words = vocabulary.run(run.root, config, run.traces(ROWS))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("somebody was asked"))
    with pytest.raises(Damaged, match=r"2 of its files .*hs_2.safetensors \(missing\), .*hs_7.safetensors \(missing\)"):
        stage.run(run.root, config, made, words, silent)
    assert time.monotonic() - began < 5
    assert len(run.asked()) == asked
    assert not list(run.root.glob("drafter/*/metrics.jsonl"))


@pytest.mark.parametrize("store", ["native", "none"])
def test_a_changed_loss_mask_stops_training_before_it_starts(
    run: Runner, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are compared with the states'; of the mask only the file's checksum tells."""
    config = run.make(drafter=DRAFTER, features={"store": store})
    made = run(ROWS) if store == "native" else features_store.assemble(run.root, config, run.traces(ROWS), [])
    masks = [list(mask) for mask in datasets.load_from_disk(made.path).with_format(None)["loss_mask"]]
    (file,) = made.folder.glob("*.arrow")
    data = bytearray(file.read_bytes())
    at = data.index(np.array(masks[3], dtype="<i8").tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert list(datasets.load_from_disk(made.path).with_format(None)["loss_mask"]) != list(masks)
    assert made.verify() == []
    monkeypatch.setattr(process, "start", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(Damaged, match=r"1 of its files .*\.arrow \(checksum differs\); run `slipstream verify --deep"):
        trained(run, made, config)


def test_a_damaged_sample_stops_training_before_a_step_in_its_own_words(run: Runner) -> None:
    """Found by a spawned data worker of the training process, told by the stage."""
    made = run(ROWS)
    damaged = made.folder / "hidden_states" / "hs_5.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 4
    damaged.write_bytes(data)
    config = run.make(drafter=DRAFTER | {"num_workers": 1})
    with pytest.raises(Damaged) as caught:
        trained(run, made, config)
    said = str(caught.value)
    assert said.startswith(f"{damaged}: checksum ")
    assert made.manifest().files["hidden_states/hs_5.safetensors"].checksum in said
    assert f"slipstream verify --deep {made.path}" in said
    assert "\n" not in said
    lines = list(metrics_file.read(next(run.root.glob("drafter/*")) / metrics_file.FILE))
    assert [set(line) for line in lines] == [{"time", "training"}]


def interpreter(folder: Path) -> Path:
    """A serve environment whose vLLM is the stub in a process of its own."""
    script = Path(__file__).parents[2] / "stub_vllm.py"
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def losses(made: Artifact) -> list[float]:
    """Of every training step."""
    return [row["train"]["loss"] for row in metrics_file.read(made.folder / metrics_file.FILE) if "train" in row]


def test_the_drafter_of_a_stream_is_the_drafter_of_the_store(run: Runner, tmp_path: Path) -> None:
    """The same losses and weights; its server is started, found ready, and gone afterwards with all that it wrote."""
    native, elsewhere = run.make(drafter=DRAFTER), tmp_path / "streamed"
    none = run.make(
        drafter=DRAFTER, features={"store": "none"}, servers={"device": "cpu", "python": str(interpreter(tmp_path))}
    )
    stored = run(ROWS)
    rows_only = features_store.assemble(elsewhere, none, run.traces(ROWS), [])
    words = vocabulary.run(run.root, native, run.traces(ROWS))
    assert stage.key(none, rows_only, words) == stage.key(native, stored, words)  # either is found for the other
    with ThreadPoolExecutor(2) as both:
        of_store = both.submit(stage.run, run.root, native, stored, words, silent)
        of_stream = both.submit(stage.run, elsewhere, none, rows_only, words, silent)
    first, second = of_store.result(), of_stream.result()
    assert len(losses(first)) > 0
    assert losses(second) == losses(first)
    assert second.content == first.content
    assert json.loads((second.folder / "job.json").read_text())["streaming"]["servers"]
    assert list((elsewhere / "pool" / "features" / "incoming").iterdir()) == []
    alive = [Path("/proc", pid, "cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    assert not [path for path in alive if path.exists() and str(elsewhere).encode() in path.read_bytes()]


def test_servers_of_a_stream_end_when_training_fails(run: Runner, tmp_path: Path) -> None:
    config = run.make(features={"store": "none"}, servers={"device": "cpu", "python": str(interpreter(tmp_path))})
    reached = []

    def fail(leases: Sequence[Lease]) -> None:
        assert httpx.get(f"{leases[0].endpoint.url}/models").status_code == 200
        reached.append(leases[0].endpoint.url)
        raise StageFailed("planted")

    with pytest.raises(StageFailed, match="planted"), beside_training.serving_states(run.root, config) as leases:
        fail(leases)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{reached[0]}/models")
    assert list((run.root / "pool" / "features" / "incoming").iterdir()) == []


@pytest.mark.parametrize(
    ("gpus", "each", "devices", "expected"), [(8, 1, [0], 7), (8, 2, [0, 1], 3), (2, 1, [1], 1), (8, 4, [3], 1)]
)
def test_servers_take_the_gpus_that_training_leaves(
    make_config: Callable[..., RunConfig], gpus: int, each: int, devices: list[int], expected: int
) -> None:
    servers = {"device": "cuda", "gpus": gpus, "tensor_parallel": each}
    config = make_config(features={"store": "none"}, servers=servers, drafter={"devices": devices})
    assert beside_training.count(config) == expected


@pytest.mark.parametrize(("gpus", "each", "devices"), [(1, 1, [0]), (8, 8, [7]), (2, 2, [0, 1])])
def test_no_gpu_left_is_refused_before_anything_starts(
    make_config: Callable[..., RunConfig], gpus: int, each: int, devices: list[int]
) -> None:
    servers = {"device": "cuda", "gpus": gpus, "tensor_parallel": each}
    config = make_config(features={"store": "none"}, servers=servers, drafter={"devices": devices})
    with pytest.raises(InputError, match=rf"leaves {gpus - len(devices)} of servers.gpus {gpus} .* needs {each}"):
        beside_training.count(config)
