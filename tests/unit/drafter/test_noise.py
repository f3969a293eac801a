"""Noise on training's states: its distribution, and that nothing but (seed, epoch, row) decides it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stub_server import StubServer

from slipstream.drafter.loaders import loaders
from slipstream.drafter.noise import Noise
from tests.unit.drafter.test_reading import DRAFTER, job
from tests.unit.features.test_store import HIDDEN, Runner, rows_of

WIDTH = 0.05
# the second token tells rows apart, for a batch has lost the first
ROWS = [
    row | {"input_ids": [row["input_ids"][0], 300 + number, *row["input_ids"][1:-1]]}
    for number, row in enumerate(rows_of(12))
]


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A stub that writes states as wide as the pocket verifier's."""
    with StubServer(hidden=HIDDEN) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path, stub: StubServer, make_config: Any) -> Runner:
    """Traces and stores in the test's own work directory."""
    return Runner(tmp_path / "work", stub, make_config)


def test_draws_are_uniform_between_minus_and_plus_the_width() -> None:
    states = torch.zeros(1000, 300)
    noise = Noise(WIDTH, seed=3, dtype=torch.float32).add(states, 2, 7).double()
    count = noise.numel()
    deviation = WIDTH / 3**0.5  # of one draw
    assert -WIDTH <= noise.min() < -0.999 * WIDTH
    assert 0.999 * WIDTH < noise.max() <= WIDTH
    assert abs(noise.mean()) < 5 * deviation / count**0.5
    assert noise.var().item() == pytest.approx(deviation**2, rel=0.01)
    quarters = torch.histc(noise, 4, -WIDTH, WIDTH) / count
    assert quarters.tolist() == pytest.approx([0.25] * 4, abs=0.005)
    assert states.count_nonzero() == 0


def test_every_seed_epoch_and_row_draws_its_own() -> None:
    states = torch.zeros(40, 6)
    drawn = {
        (seed, epoch, row): Noise(WIDTH, seed, torch.float32).add(states, epoch, row)
        for seed in (0, 1)
        for epoch in (0, 1)
        for row in (0, 1)
    }
    assert len({values.numpy().tobytes() for values in drawn.values()}) == 8
    assert torch.equal(drawn[1, 0, 1], Noise(WIDTH, 1, torch.float32).add(states, 0, 1))
    assert torch.equal(drawn[1, 0, 1][:9], Noise(WIDTH, 1, torch.float32).add(states[:9], 0, 1))


def test_bfloat16_states_are_rounded_once() -> None:
    states = torch.full((5, 8), 1.5, dtype=torch.bfloat16)
    exact = Noise(WIDTH, 0, torch.float32).add(states, 0, 0)
    assert torch.equal(Noise(WIDTH, 0, torch.bfloat16).add(states, 0, 0), exact.bfloat16())


Rows = dict[bytes, torch.Tensor]


def rows_of_pass(loader: Any, epoch: int, first: int = 0) -> Rows:
    """The auxiliary states [tokens, values] of an epoch's rows from a batch on, by the bytes of its last state."""
    found: Rows = {}
    loader.order.start(epoch, first)
    for batch in loader:
        documents = batch["document_ids"][0]
        for number in range(int(documents.max()) + 1):
            of_row = documents == number
            last = batch["verifier_last_hidden_states"][0][of_row]
            found[last.numpy().tobytes()] = batch["hidden_states"][0][of_row]
    return found


def assert_same(left: Rows, right: Rows) -> None:
    """Bit for bit, whatever the order."""
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_workers_packing_and_a_resumed_run_see_the_same_bits_and_validation_none(run: Runner) -> None:
    made = run(ROWS)

    def training(noise: float, **drafter: Any) -> tuple[Any, Any]:
        config = run.make(drafter=DRAFTER | {"noise": noise, "seed": 5} | drafter)
        return loaders(job(config, made), 3, torch.float32)

    clean, clean_validation = training(0.0)
    noisy, validation = training(WIDTH)
    first, second = rows_of_pass(noisy, 0), rows_of_pass(noisy, 1)
    plain = rows_of_pass(clean, 0)
    assert len(plain) == 9  # of twelve rows, three validate
    assert first.keys() == second.keys() == plain.keys()  # the last state is untouched
    added = {key: first[key] - plain[key] for key in plain}
    assert all((difference.abs() <= WIDTH * 1.001).all() for difference in added.values())
    assert all((difference != 0).float().mean() > 0.99 for difference in added.values())
    assert not any(torch.equal(first[key], second[key]) for key in plain)
    assert_same(rows_of_pass(validation, 0), rows_of_pass(clean_validation, 0))

    processes, _ = training(WIDTH, num_workers=2)
    processes.multiprocessing_context = "fork"  # spawned ones would import torch again
    assert_same(rows_of_pass(processes, 0), first)
    assert_same(rows_of_pass(processes, 1), second)  # workers live on, with copies made in epoch 0
    assert_same(rows_of_pass(training(WIDTH)[0], 1), second)  # a process that begins with epoch 1
    packed, _ = training(WIDTH, sequence_length=16)
    assert_same(rows_of_pass(packed, 1), second)
    rest = rows_of_pass(packed, 1, first=2)  # a process that begins inside epoch 1
    assert 0 < len(rest) < len(second)
    assert_same(rest, {key: second[key] for key in rest})
    assert first.keys() == rows_of_pass(training(WIDTH, seed=6)[0], 0).keys()
    assert not any(torch.equal(other, first[key]) for key, other in rows_of_pass(training(WIDTH, seed=6)[0], 0).items())
