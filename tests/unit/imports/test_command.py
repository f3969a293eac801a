"""`slipstream import` as a command: refusals in one sentence with both values, and what a kill -9 leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from slipstream import cli
from slipstream.config import RunConfig
from slipstream.features import store as features_store
from slipstream.imports import stage
from tests.unit.conftest import POCKET, ROOT
from tests.unit.imports.conftest import Made, write_current, write_v1
from tests.unit.imports.test_stage import OFFLINE

Command = Callable[..., tuple[int, str, str]]
COUNT = 150  # samples of the store whose import is killed
SAID = ("--no-probe", "--convention", "output")


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, values: dict[str, Any]
) -> Command:
    """Runs `slipstream import STORE CONFIG …` in this process; `changes` to the configuration by section."""
    monkeypatch.setenv("SLIPSTREAM_WORKDIR", str(tmp_path / "work"))

    def run(store: Path, *arguments: str, **changes: dict[str, Any]) -> tuple[int, str, str]:
        for section, fields in changes.items():
            values[section] |= fields
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
        monkeypatch.setattr(sys, "argv", ["slipstream", "import", str(store), str(tmp_path / "run.yaml"), *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


def refused(done: tuple[int, str, str], work: Path, *words: str) -> None:
    """Exit 2, one sentence with these words, nothing written and nothing started."""
    status, out, err = done
    sentence = err.strip().splitlines()[-1]
    assert (status, out) == (2, ""), err
    assert sentence.startswith("slipstream: ")
    assert "Traceback" not in err
    assert all(word in sentence for word in words), sentence
    assert not [path for path in work.rglob("*") if path.is_file() and path.name != ".lock"]


def test_an_import_says_what_to_do_next(command: Command, tmp_path: Path, rows: list[Made]) -> None:
    store = write_v1(tmp_path / "v1", rows)
    torch.save({1: 2}, store / "token_freq.pt")
    status, out, err = command(store, *SAID)
    assert status == 0, err
    lines = out.splitlines()
    assert "12 samples" in lines[0]
    assert "layer ids [2, 3, 5, 6] in vLLM's convention" in lines[0]
    assert "NOT measured on a server" in lines[0]
    assert lines[1].startswith(f"{store / 'token_freq.pt'}: not used")
    traces = Path(lines[2].split()[1])
    assert (traces / "manifest.json").is_file()
    assert (Path(lines[3].split()[1]) / "hidden_states" / "hs_11.safetensors").is_file()
    assert lines[-1].split() == ["imported:", str(traces)]


CONFIG_CASES: dict[str, tuple[dict[str, dict[str, Any]], list[str]]] = {
    "layer ids of the configuration out of range": ({"features": {"layer_ids": [2, 9]}}, ["9 is not", "1 to 5"]),
    "the final layer among them": ({"features": {"layer_ids": [2, 3, 6]}}, ["6 is the final state"]),
    "other layers": ({"features": {"layer_ids": [1, 3, 5]}}, ["[2, 3, 5, 6]", "wants [1, 3, 5]", "[1] are not there"]),
    "another type": ({"verifier": {"dtype": "bfloat16"}}, ["data_0.pt", "type float32", "want bfloat16"]),
    "no store wanted": ({"features": {"store": "none"}}, ["features.store: none"]),
    "rows without their end": ({"features": {"capture_while_generating": True}}, ["capture_while_generating"]),
    "no verifier": ({"verifier": {"path": "no/such"}}, ["no/such"]),
}


@pytest.mark.parametrize("case", CONFIG_CASES)
def test_what_the_configuration_has_wrong(command: Command, tmp_path: Path, rows: list[Made], case: str) -> None:
    changes, words = CONFIG_CASES[case]
    refused(command(write_v1(tmp_path / "v1", rows), *SAID, **changes), tmp_path / "work", *words)


SAID_CASES: dict[str, tuple[list[str], list[str]]] = {
    "no convention": (["--no-probe"],
                      ["[1, 2, 4, 5]", "without a convention", "--convention vllm", "--convention output"]),
    "the other convention": (
        ["--no-probe", "--convention", "vllm"],
        ["last state is id 5, the input of the last layer", "final state is id 6", "--convention output"],
    ),
    "an id out of range": (["--no-probe", "--convention", "vllm", "--layer-ids", "2", "3", "5", "7"],
                           ["layer id 7 is out of range", "0 to 6"]),
    "the final state among the others": (["--no-probe", "--convention", "vllm", "--layer-ids", "2", "6", "5", "6"],
                                         ["6 is the final state", "[2, 6, 5]"]),
    "too few ids": ([*SAID, "--layer-ids", "1", "5"], ["data_0.pt", "states a token: 4", "name 2"]),
    "the other side of the norm": ([*SAID, "--final-state", "after"],
                                   ["said to hold the final state after", "before it"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID_CASES)
def test_what_the_user_says_wrong(command: Command, tmp_path: Path, rows: list[Made], case: str) -> None:
    arguments, words = SAID_CASES[case]
    refused(command(write_v1(tmp_path / "v1", rows), *arguments), tmp_path / "work", *words)


def test_the_input_of_the_last_layer_said_to_be_the_final_state(
    command: Command, tmp_path: Path, rows: list[Made]
) -> None:
    """The field's 60 of 61: nothing in the store contradicts the ids, only its states do."""
    done = command(write_v1(tmp_path / "v1", rows, [1, 2, 4, 5]), *SAID, "--layer-ids", "1", "2", "4", "5")
    refused(done, tmp_path / "work", "finds its rows' own tokens", "where its entropy is", "not the final state, id 6")


def test_an_early_layer_in_the_last_place(command: Command, tmp_path: Path, rows: list[Made]) -> None:
    done = command(write_v1(tmp_path / "v1", rows, [2, 3, 6, 5]), *SAID, "--layer-ids", "1", "2", "4", "5")
    refused(done, tmp_path / "work", "position 2 finds them", "the last one is not the final state", "[2, 3, 5, 6]")


def test_another_hidden_size(command: Command, tmp_path: Path, rows: list[Made]) -> None:
    narrow = [replace(row, states=row.states[..., :64].clone()) for row in rows]
    store = write_v1(tmp_path / "v1", narrow)
    refused(command(store, *SAID), tmp_path / "work", "data_0.pt: hidden size 64", "has 128", "12 of 12")
    said = {"model": {"hidden_size": 64}}
    store = write_v1(tmp_path / "said", rows, config=said)
    refused(command(store, *SAID), tmp_path / "work", "data_config.json", "hidden size 64", "128")


def test_tokens_beyond_the_vocabulary(command: Command, tmp_path: Path, rows: list[Made]) -> None:
    store = write_v1(tmp_path / "v1", [*rows[:5], replace(rows[5], ids=[*rows[5].ids[:-1], 600]), *rows[6:]])
    refused(command(store, *SAID), tmp_path / "work", "data_5.pt", "token id 600", "512 tokens", "another tokenizer")


def test_a_mask_that_is_empty_everywhere(command: Command, tmp_path: Path, rows: list[Made]) -> None:
    store = write_v1(tmp_path / "v1", [replace(row, mask=[0] * len(row.ids)) for row in rows])
    refused(command(store, *SAID), tmp_path / "work", "the loss mask is empty in every sample")


def test_what_is_no_store(command: Command, tmp_path: Path) -> None:
    refused(command(tmp_path, *SAID), tmp_path / "work", "no hidden-state store")


def test_without_ids_and_without_a_server(command: Command, tmp_path: Path, rows: list[Made]) -> None:
    store = write_current(tmp_path / "store", rows)
    refused(command(store, *SAID), tmp_path / "work", "does not say which layers it holds", "--layer-ids")


def test_a_store_of_ours_made_with_another_verifier(
    command: Command, tmp_path: Path, rows: list[Made], make_config: Callable[..., RunConfig], values: dict[str, Any]
) -> None:
    config = make_config(workdir=str(tmp_path / "first"))
    made = stage.run(config.root, config, write_v1(tmp_path / "v1", rows), OFFLINE)
    assert command(made.features.folder, "--no-probe")[0] == 0  # its manifest says everything
    shutil.rmtree(tmp_path / "work")
    other = tmp_path / "other"
    shutil.copytree(POCKET, other)
    text = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps(text | {"changed": 1}))
    done = command(made.features.folder, "--no-probe", verifier={"path": str(other)})
    refused(done, tmp_path / "work", "made with the verifier of digest", made.features.manifest().recipe["verifier"])


def test_a_folder_of_another_stage(command: Command, tmp_path: Path, rows: list[Made]) -> None:
    store = write_current(tmp_path / "store", rows)
    from slipstream.artifact import claim

    with claim(tmp_path / "artifacts", "vocabulary", "k") as folder:
        shutil.copytree(store, folder.path, dirs_exist_ok=True)
        folder.commit(version=1, recipe={}, inputs={}, content="c", files=[])
    refused(
        command(tmp_path / "artifacts" / "vocabulary" / "k", *SAID), tmp_path / "work", "stage vocabulary", "features"
    )


def prefixes(rows: list[Made], count: int) -> list[Made]:
    """More rows: beginnings of rows, whose states are those of the whole."""
    cut = [(row, end) for end in range(1, 60) for row in rows if len(row.ids) - end > row.mask.index(1) + 2]
    return [
        replace(row, ids=row.ids[:-end], mask=row.mask[:-end], states=row.states[:-end]) for row, end in cut[:count]
    ]


def files(folder: Path) -> dict[str, bytes]:
    """The content of an artifact, without its manifest's clock and the tree's own names."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", ".lock", "state.json", "dataset_info.json")
    }


def test_killed_half_way_and_repeated(
    tmp_path: Path, rows: list[Made], make_config: Callable[..., RunConfig], values: dict[str, Any]
) -> None:
    store = write_v1(tmp_path / "v1", prefixes(rows, COUNT))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values | {"workdir": str(tmp_path / "work")}))
    line = [sys.executable, "-m", "slipstream.cli", "import", str(store), str(tmp_path / "run.yaml"), *SAID]
    child = subprocess.Popen(line, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    pool = tmp_path / "work" / "pool" / "features"
    deadline = time.monotonic() + 60
    while (held := len(list(pool.glob("*/??/*.safetensors")))) < COUNT // 3 and child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "the import ended before it was killed"
    left = len(list(pool.glob("*/??/*.safetensors")))
    assert held <= left < COUNT
    assert not list((tmp_path / "work").glob("traces/*/manifest.json"))

    config = make_config()
    assert config.root == tmp_path / "work"
    repeated = stage.run(config.root, config, store, OFFLINE)
    assert repeated.adopted == COUNT - left
    undisturbed_config = make_config(workdir=str(tmp_path / "undisturbed"))
    undisturbed = stage.run(undisturbed_config.root, undisturbed_config, store, OFFLINE)
    for ours, theirs in ((repeated.traces, undisturbed.traces), (repeated.features, undisturbed.features)):
        assert (ours.key, ours.content) == (theirs.key, theirs.content)
        assert files(ours.folder) == files(theirs.folder)
        assert ours.verify(deep=True) == []
    assert len(list((repeated.features.folder / features_store.HIDDEN_STATES).iterdir())) == COUNT
    assert [path.name for path in (pool.parent / "imports").iterdir()] == [".lock"]
