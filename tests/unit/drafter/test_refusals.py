"""What is refused before anything is started, with both values."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_server import StubServer

from slipstream import process
from slipstream.errors import InputError
from slipstream.features import beside_training
from tests.unit.drafter.test_reading import DRAFTER, trained
from tests.unit.features.test_store import HIDDEN, Runner, rows_of

ROWS = rows_of(12)  # three validate


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A stub that writes states as wide as the pocket verifier's."""
    with StubServer(hidden=HIDDEN) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path, stub: StubServer, make_config: Any, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Traces and stores in the test's own work directory, where nothing may start."""
    monkeypatch.setattr(process, "start", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr(beside_training, "serving_states", lambda *_: pytest.fail("a server was started"))
    return Runner(tmp_path / "work", stub, make_config)


def test_features_of_other_layers(run: Runner) -> None:
    made = run(ROWS)
    config = run.make(drafter=DRAFTER, features={"layer_ids": [2, 3, 4]})
    with pytest.raises(InputError, match=r"holds the states of layers \[2, 3, 5, 6\].* asks for \[2, 3, 4, 6\]"):
        trained(run, made, config)


def test_a_verifier_without_its_head(run: Runner, tmp_path: Path, root: Path) -> None:
    """An untied checkpoint whose index has lost the head; its embedding would fit in its place."""
    folder = shutil.copytree(root / "slipstream" / "pocket" / "verifier", tmp_path / "verifier")
    index = folder / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    del held["weight_map"]["language_model.lm_head.weight"]
    index.write_text(json.dumps(held))
    config = run.make(drafter=DRAFTER, verifier={"path": str(folder)})
    with pytest.raises(InputError, match=r"verifier: the checkpoint has no lm_head\.weight"):
        trained(run, run(ROWS), config)


def test_fewer_rows_than_devices(run: Runner) -> None:
    """The sampler drops what does not fill every rank: five epochs of no step would end as a success."""
    config = run.make(drafter=DRAFTER | {"devices": [0, 1, 2, 3]})
    with pytest.raises(InputError, match=r"3 validation rows for 4 GPUs"):
        trained(run, run(ROWS), config)


@pytest.mark.parametrize(("split", "words"), [("train", "9 train rows"), ("validation", "3 validation rows")])
@pytest.mark.parametrize("store", ["native", "none"])
def test_a_split_without_a_supervised_token(run: Runner, split: str, words: str, store: str) -> None:
    from slipstream.features import store as features_store

    rows = [row | ({"loss_mask": [0] * len(row["loss_mask"])} if row["split"] == split else {}) for row in ROWS]
    config = run.make(drafter=DRAFTER, features={"store": store})
    made = run(rows) if store == "native" else features_store.assemble(run.root, config, run.traces(rows), [])
    tokens = sum(len(row["input_ids"]) for row in rows if row["split"] == split)
    with pytest.raises(InputError, match=rf"0 of the {tokens} tokens of the {words} are supervised"):
        trained(run, made, config)


def test_supervised_tokens_that_no_step_reaches(run: Runner) -> None:
    """Each row's answer begins behind the packed length; a first token is nobody's target."""
    rows = [row | {"input_ids": list(range(1, 31)), "loss_mask": [1] + [0] * 16 + [1] * 13} for row in ROWS]
    rows = [row | {"input_ids": [100 + number, *row["input_ids"][1:]]} for number, row in enumerate(rows)]
    made = run(rows)
    with pytest.raises(InputError, match=r"0 supervised tokens lie within drafter.sequence_length \(16\), 126 beyond"):
        trained(run, made, run.make(drafter=DRAFTER | {"sequence_length": 16}))
    with pytest.raises(pytest.fail.Exception, match="a process was started"):
        trained(run, made, run.make(drafter=DRAFTER | {"sequence_length": 17}))


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "mlflow", "wandb"])
def test_a_tracker_that_is_not_installed(run: Runner, name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    config = run.make(drafter=DRAFTER | {"trackers": [name]})
    with pytest.raises(InputError, match=rf"package {name} is not installed .* run `pip install {name}`"):
        trained(run, run(ROWS[:4] + ROWS[-1:]), config)
