"""The probe inside a shard's capture: what is written, when it runs, and types of low precision."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pocket_states import pocket, samples, serve
from stub_server import Capture, StubServer

from slipstream.artifact import Artifact, claim
from slipstream.config import RunConfig
from slipstream.digest import digest_tokens
from slipstream.errors import StageFailed
from slipstream.features import last_state, probe, shard_stage
from slipstream.features.distance import relative
from slipstream.features.lease import Lease
from slipstream.features.shards import Shard
from slipstream.features.tolerance import TOLERANCES
from slipstream.progress import silent
from slipstream.serving import Endpoint
from slipstream.verifier_ends import read_head

IDS = [2, 3, 5, 6]
ROWS = samples()[:6]


class Runner:
    """Captures one shard of `ROWS` in the test's work directory."""

    def __init__(self, root: Path, stub: StubServer, config: RunConfig) -> None:
        self.root, self.stub, self.config = root, stub, config
        self.lent = 0

    @contextmanager
    def lend(self) -> Iterator[Lease]:
        self.lent += 1
        yield Lease(Endpoint(self.stub.url, "stub"), self.stub.storage)

    def traces(self, rows: Sequence[Sequence[int]]) -> Artifact:
        columns = [
            {"key": f"k{i}", "input_ids": list(ids), "loss_mask": [1] * len(ids), "prompt_tokens": 1, "split": "train"}
            for i, ids in enumerate(rows)
        ]
        with claim(self.root, "traces", f"of{len(rows)}") as folder:
            pq.write_table(pa.Table.from_pylist(columns), folder.path / "traces.parquet")
            return folder.commit(version=1, recipe={}, inputs={}, content="c", files=["traces.parquet"])

    def __call__(self, rows: Sequence[Sequence[int]] = ROWS) -> Artifact:
        shard = Shard(index=0, start=0, stop=len(rows))
        return shard_stage.capture_shard(self.root, self.config, self.traces(rows), shard, self.lend, silent)

    def probed(self) -> int:
        """Requests that asked for log-probabilities."""
        return sum("prompt_logprobs" in body for body in self.stub.asked("/v1/completions"))


@pytest.fixture
def run(tmp_path: Path, stub: StubServer, make_config: Callable[..., RunConfig]) -> Runner:
    """A server of the pocket verifier's layers 2, 3, 5 and 6, two samples of a shard probed."""
    serve(stub, IDS, pocket())
    return Runner(tmp_path / "work", stub, make_config(features={"probe_samples": 2}))


def test_the_manifest_says_what_was_probed(run: Runner) -> None:
    made = run()
    work, written = made.manifest().work, json.loads((made.folder / probe.FILE).read_text())
    assert work["captured"] == 6
    assert work["probe"] == written["summary"]
    assert work["probe"]["samples"] == run.probed() == 2
    assert probe.FILE in made.manifest().files
    assert made.verify(deep=True) == []


def test_reused_samples_are_not_probed_again(run: Runner) -> None:
    run()
    more = run([*ROWS[:3], *ROWS[3:6][::-1]])  # another shard of the same samples
    assert (more.manifest().work["captured"], more.manifest().work["probe"]) == (0, None)
    assert (run.lent, run.probed()) == (2, 2)  # once to capture, once to probe
    assert run([*ROWS, samples()[6]]).manifest().work["probe"]["samples"] == 1


def test_a_lost_sample_is_probed_when_it_is_captured_again(run: Runner) -> None:
    made = run()
    lost = max((made.folder / name for name in made.manifest().files if name.startswith("..")), key=lambda p: p.name)
    lost.unlink()
    work = run().manifest().work
    assert (work["captured"], work["probe"]["samples"]) == (1, 1)
    probed = json.loads((made.folder / probe.FILE).read_text())["samples"]
    assert [sample["key"] for sample in probed] == [lost.stem]


def test_a_damaged_sample_that_cannot_be_captured_again_is_lost_and_not_probed(run: Runner) -> None:
    """Its emptied file is still there, and the probe must not take that for a sample."""
    made = run()
    damaged = next(made.folder / name for name in made.manifest().files if name.startswith(".."))
    damaged.write_bytes(b"")
    (tokens,) = (ids for ids in ROWS if digest_tokens(ids) == damaged.stem)
    run.stub.on_capture(
        lambda asked, number: Capture(status=400) if asked == tokens else Capture(states=pocket().states(asked, IDS))
    )
    features = run.config.features.model_copy(update={"max_lost_share": 0.5})
    run.config, lent = run.config.model_copy(update={"features": features}), run.lent
    again = run().manifest()
    assert (again.counts["samples"], again.counts["lost"], again.work["probe"]) == (5, 1, None)
    assert run.lent == lent + 1  # for the capture alone


def test_a_shard_that_was_killed_before_its_probe_is_probed(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(probe, "probe", killed)
        with pytest.raises(KeyboardInterrupt):
            run()
    made = run()
    assert made.manifest().work["captured"] == 0
    assert made.manifest().work["probe"]["samples"] == 2


def test_a_failed_probe_fails_the_shard_under_every_division(run: Runner) -> None:
    """The server gives other states the second time: nobody can say which were right."""
    wrong = pocket().states(ROWS[0], [2, 3, 5, 5])

    def decide(tokens: list[int], number: int) -> Capture:
        first = number < len(ROWS)
        states = wrong[: len(tokens)] if first and tokens == ROWS[0] else pocket().states(tokens, IDS)
        return Capture(states=states, prompt_logprobs=pocket().logprobs(tokens))

    run.stub.on_capture(decide)
    run.config = run.config.model_copy(update={"features": run.config.features.model_copy(update={"probe_samples": 6})})
    with pytest.raises(StageFailed, match="holds id 5") as raised:
        run()
    assert not raised.value.transient  # nobody tries again by himself
    with pytest.raises(StageFailed, match="holds id 5"):
        run(ROWS[:2])
    captured = [body for body in run.stub.asked("/v1/completions") if "prompt_logprobs" not in body]
    assert len(captured) == len(ROWS)


def _fp8(states: torch.Tensor) -> torch.Tensor:
    """hs-connectors' form: one scale a token, e4m3 codes."""
    scale = states.abs().amax((-1, -2), keepdim=True) / 448
    return (states / scale).to(torch.float8_e4m3fn).float() * scale


ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": lambda states: states,
    "float16": lambda states: states.half().float(),
    "bfloat16": lambda states: states.bfloat16().float(),
    "float8_e4m3fn": _fp8,
}


@pytest.mark.parametrize("dtype", ROUNDED)
def test_an_intact_store_of_each_type_agrees_and_a_doubled_norm_does_not(root: Path, dtype: str) -> None:
    """Against transformers in float32; served types add their own noise, see `tolerance`."""
    tolerance, head = TOLERANCES[dtype], read_head(root / "slipstream/pocket/verifier")
    for tokens in ROWS:
        exact = torch.from_numpy(pocket().states(tokens, IDS))
        stored = ROUNDED[dtype](exact)
        assert max(relative(stored[:, at], exact[:, at]) for at in range(4)) < tolerance.states
        served: list[dict[int, float]] = [row or {} for row in pocket().logprobs(tokens)]
        once = last_state.compare(head, head.normed(stored[:, -1]), served, tolerance)
        twice = last_state.compare(head, head.normed(head.normed(stored[:, -1])), served, tolerance)
        assert once is not None
        assert twice is not None
        assert once.within(tolerance), once
        assert not twice.within(tolerance), twice


def test_agreement_counts_near_ties_apart_and_forgives_one_miss_in_a_short_sample() -> None:
    """By hand: a head of four tokens that passes logits through."""

    class Head:
        def log_probabilities(self, states: torch.Tensor) -> torch.Tensor:
            return torch.log_softmax(states, -1)

    def against(served_best: Sequence[int], gap: float) -> Any:
        states = torch.zeros(len(served_best), 4)
        states[:, 0], states[:, 1] = 3.0, 3.0 - gap
        logs = torch.log_softmax(states[0], -1)
        served: list[dict[int, float]] = [{}]
        served += [{best: -0.1, 1 - best: -0.2, 2: float(logs[2])} for best in served_best]
        return last_state.compare(Head(), states, served, TOLERANCES["bfloat16"])  # type: ignore[arg-type]

    tied = against([0, 1, 1, 0], gap=0.05)
    assert (tied.positions, tied.near_ties, tied.argmax) == (4, 2, 1.0)
    missed = against([0, 1, 1, 0], gap=0.5)
    assert (missed.near_ties, missed.argmax) == (0, 0.5)
    assert not missed.within(TOLERANCES["bfloat16"])
    assert last_state.compare(Head(), torch.zeros(1, 4), [{}], TOLERANCES["bfloat16"]) is None  # type: ignore[arg-type]
    assert np.isclose(against([0] * 99 + [1], gap=0.5).argmax, 0.99)
