"""kill -9 at ten random steps of one training: it ends as the undisturbed one, bit for bit, and its metrics too."""

from __future__ import annotations

import random
from pathlib import Path

from tests import training
from tests.training_driver import PLACES
from tests.unit.features.test_store import rows_of

EPOCHS, KILLS = 3, 10
OPTIONS = {"epochs": EPOCHS, "checkpoint_steps": 3, "noise": 0.05, "scheduler": "cosine", "warmup_ratio": 0.1}


def test_ten_kills_change_no_bit_of_weights_moments_and_metrics(tmp_path: Path) -> None:
    with training.runner(tmp_path) as run:
        made = training.inputs(run, rows_of(48))
        undisturbed = training.job(run, made, "undisturbed", **OPTIONS)
        killed = training.job(run, made, "killed", **OPTIONS)
    chance = random.Random(5)
    with training.driver() as driver:
        assert driver.train(undisturbed) == [0]
        expected = training.steps(undisturbed)
        assert [step for _, step, _, _ in expected] == list(range(len(expected)))
        assert len({rate for _, _, rate, _ in expected}) > len(expected) // 2
        places = [*PLACES, *chance.choices(PLACES, k=KILLS - len(PLACES))]
        chance.shuffle(places)
        for step, where in zip(sorted(chance.sample(range(len(expected)), KILLS)), places, strict=True):
            assert driver.train(killed, at=(step, where)) == [-9], f"not killed {where}"
        assert driver.train(killed) == [0]
    assert training.steps(killed) == expected
    assert training.validations(killed) == training.validations(undisturbed)
    assert [epoch for epoch, _ in training.validations(killed)] == list(range(EPOCHS))
    stores = [path.parent / "checkpoints" for path in (undisturbed, killed)]
    assert sorted(path.name for path in stores[1].iterdir()) == sorted(path.name for path in stores[0].iterdir())
    for epoch in range(EPOCHS):
        for file in ("model.safetensors", "optimizer.state", "training_state.json", "val_metrics.json"):
            theirs, ours = (store / str(epoch) / file for store in stores)
            assert ours.read_bytes() == theirs.read_bytes(), f"epoch {epoch}: {file} differs"
