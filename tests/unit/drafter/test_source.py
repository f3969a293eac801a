"""What `slipstream export` and `publish` take: runs, artifacts, epochs, exports, checkpoints of anyone."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import cli
from slipstream.artifact import Artifact, claim
from slipstream.drafter import export, flat, opened, source
from slipstream.errors import Damaged, InputError
from tests.unit.drafter import tiny


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    """A finished drafter of two epochs, the first one the best, its checkpoint pruned; measured once."""
    with claim(tmp_path, "drafter", "k") as folder:
        about = {"run": "mine", "verifier": {"name": "Kimi"}, "serve": {"arguments": ["--max-model-len", "512"]}}
        (folder.path / "about.json").write_text(json.dumps(about))
        for name, value in (("0", 1.0), ("1", 2.0)):
            checkpoint = folder.path / "checkpoints" / name
            tiny.save(checkpoint, tensors=tiny.tensors(**{"norm.weight": torch.full((8,), value)}))
            (checkpoint / "replay.json").write_text(json.dumps({"accepted_length": 2.5 + value}))
            export.export_epoch(folder.path, name, "bfloat16")
        shutil.rmtree(folder.path / "checkpoints" / "0")
        files = [str(p.relative_to(folder.path)) for p in sorted(folder.path.rglob("*.*")) if p.is_file()]
        made = folder.commit(
            version=1,
            recipe={"export_dtype": "bfloat16"},
            inputs={},
            content="drafter-content",
            files=[name for name in files if not name.startswith(".")],
            counts={"best_epoch": "0"},
        )
    with claim(tmp_path, "acceptance", "a") as folder:
        figures = {"mean_accepted_length": 3.21, "verdict": "accepted", "reason": "it is faster"}
        (folder.path / "acceptance.json").write_text(json.dumps(figures))
        folder.commit(
            version=1, recipe={}, inputs={"drafter": "drafter-content"}, content="x", files=["acceptance.json"]
        )
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "drafter").symlink_to(made.folder)
    return made


def norm(folder: Path) -> float:
    """The value that tells the epochs apart."""
    return float(load_file(folder / "model.safetensors")["norm.weight"][0])


@pytest.mark.parametrize("what", ["mine", "runs/mine", "drafter/k"])
def test_a_run_and_its_artifact_are_the_best_epoch(artifact: Artifact, tmp_path: Path, what: str) -> None:
    named = what if what == "mine" else str(tmp_path / what)
    found = source.find(named, None, tmp_path)
    assert norm(found.folder) == 1.0
    assert found.dtype == "bfloat16"
    assert found.facts["epoch"]["replay"]["accepted_length"] == 3.5
    assert found.facts["served"]["mean_accepted_length"] == 3.21


def test_another_epoch_has_its_own_replay_and_no_served_verdict(artifact: Artifact, tmp_path: Path) -> None:
    for found in (
        source.find("mine", "1", tmp_path),
        source.find(str(artifact.folder / "epochs" / "1"), None, tmp_path),
    ):
        assert norm(found.folder) == 2.0
        assert found.facts["epoch"]["replay"]["accepted_length"] == 4.5
        assert "served" not in found.facts


def test_what_is_not_there_is_said(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no epoch 7; it has 0, 1"):
        source.find("mine", "7", tmp_path)
    with pytest.raises(InputError, match="known runs are mine"):
        source.find("other", None, tmp_path)
    with pytest.raises(InputError, match="stage acceptance"):
        source.find(str(tmp_path / "acceptance" / "a"), None, tmp_path)
    (tmp_path / "runs" / "early").mkdir()
    with pytest.raises(InputError, match="early: this run has no drafter yet"):
        source.find("early", None, tmp_path)
    with pytest.raises(InputError, match="--epoch"):
        source.find(str(tiny.save(tmp_path / "c")), "1", tmp_path)


def test_a_damaged_artifact_is_not_exported(artifact: Artifact, tmp_path: Path) -> None:
    (artifact.folder / "epochs" / "0" / "flat" / "model.safetensors").write_bytes(b"")
    with pytest.raises(Damaged, match="run the configuration again"):
        source.find("mine", None, tmp_path)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit status of `slipstream export …`."""
    monkeypatch.setattr(sys, "argv", ["slipstream", "export", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_export_of_a_run_says_what_was_measured(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_WORKDIR", str(tmp_path))
    assert command(monkeypatch, "mine", "--engine", "sglang", "--output", str(tmp_path / "out")) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    card = (tmp_path / "out" / "README.md").read_text()
    for line in ("| accepted length, offline replay of validation rows | 3.5 |", "3.21", "accepted: it is faster"):
        assert line in card
    assert str(tmp_path) not in card
    assert not list(tmp_path.glob(".out*"))


def test_an_existing_folder_is_never_written_into(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_WORKDIR", str(tmp_path))
    (tmp_path / "out").mkdir()
    assert command(monkeypatch, "mine", "--output", str(tmp_path / "out")) == 2
    assert "is there already" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("embeddings", [True, False])
def test_an_external_flat_drafter_goes_through_speculators_form_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embeddings: bool
) -> None:
    """AQ-MedAI's form: `midlayer.*`, ids in `eagle_config` only, old rope spelling; every tensor comes back."""
    monkeypatch.setenv("SLIPSTREAM_WORKDIR", str(tmp_path))
    given = tiny.flat(tmp_path / "given", embeddings=embeddings)
    there, back = tmp_path / "speculators", tmp_path / "flat"
    assert command(monkeypatch, str(given), "--form", "speculators", "--verifier", "org/k", "--output", str(there)) == 0
    assert command(monkeypatch, str(there), "--output", str(back)) == 0
    before, after = load_file(given / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (given, back))
    assert new["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert {name: new[name] for name in old if name not in ("eagle_config", "torch_dtype")} == {
        name: value for name, value in old.items() if name not in ("eagle_config", "torch_dtype")
    }


def test_shards_and_a_prefix_are_one_checkpoint(tmp_path: Path) -> None:
    given = tiny.flat(tmp_path / "given")
    whole = load_file(given / "model.safetensors")
    (given / "model.safetensors").unlink()
    for number in (0, 1):
        part = {f"model.{name}": value for i, (name, value) in enumerate(sorted(whole.items())) if i % 2 == number}
        save_file(part, given / f"model-{number}.safetensors")
    read = opened.read(given)
    assert read.tensors.keys() == {*tiny.SHAPES, "d2t", "t2d"}
    save_file({"fc.weight": whole["fc.weight"]}, given / "other.safetensors")
    with pytest.raises(InputError, match=r"fc\.weight is there twice"):
        opened.read(given)


@pytest.mark.parametrize("name", ["aq-medai-kimi-k2.5", "lightseekorg-kimi-k2.5"])
def test_a_published_drafters_config_comes_back_as_it_was_published(name: str) -> None:
    """Field values of the published config.json files (slipstream/drafters), at Kimi-K2.5's shape."""
    published = json.loads((resources.files("slipstream") / "drafters" / f"{name}.json").read_text())
    read = opened.spelled_out(published, Path(name))
    written = flat.config(read, "bfloat16", name)
    assert written["eagle_config"].items() >= published["eagle_config"].items()
    fields = published.keys() - {"source", "eagle_config"}
    assert {key: written[key] for key in fields} == {key: published[key] for key in fields}
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]


def without(*names: str) -> dict[str, torch.Tensor]:
    """The tensors but some."""
    return {name: value for name, value in tiny.tensors().items() if name not in names}


BAD: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor] | None, str]] = {
    "no d2t": ({}, without("d2t"), "no d2t, and its 4 draft tokens are not the verifier's 8"),
    "no t2d": ({}, without("t2d"), "no t2d, and"),
    "no mapping": ({}, without("d2t", "t2d"), "no d2t and no t2d"),
    "no head": ({}, without("lm_head.weight"), "lm_head.weight is missing"),
    "short head": ({}, tiny.tensors(**{"lm_head.weight": torch.ones(3, 8)}), r"lm_head.weight is \[3, 8\].*\[4, 8\]"),
    "short mapping": ({}, tiny.tensors(d2t=torch.tensor([0, 0, 0])), r"d2t is \[3\].*\[4\]"),
    "other count": ({}, tiny.tensors(t2d=torch.ones(8, dtype=torch.bool)), "marks 8 tokens but d2t has 4"),
    "absolute ids": ({}, tiny.tensors(d2t=torch.tensor([0, 1, 2, 5])), "OFFSET"),
    "two layers": ({"layer": {"num_hidden_layers": 2}}, None, "2 decoder layers"),
    "hidden size": ({"layer": {"hidden_size": 16}}, None, r"is \[8, 8\], and its config makes it \[8, 16\]"),
    "no ids": ({"eagle_aux_hidden_state_layer_ids": None}, None, "eagle_aux_hidden_state_layer_ids"),
    "another algorithm": ({"speculators_model_type": "dflash"}, None, "dflash"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints_are_one_sentence(tmp_path: Path, name: str) -> None:
    changes, tensors, says = BAD[name]
    folder = tiny.save(tmp_path / "bad", tiny.config(**changes), tensors)
    with pytest.raises((InputError, Damaged), match=says) as raised:
        opened.read(folder)
    assert "\n" not in str(raised.value)
    assert str(folder) in str(raised.value)


def test_folders_that_are_no_drafter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="what drafter this is"):
        opened.read(tmp_path)
    with pytest.raises(InputError, match="LlamaForCausalLM of model_type 'llama' is not a Llama-type EAGLE-3 drafter"):
        opened.read(tiny.flat(tmp_path / "a", architectures=["LlamaForCausalLM"]))
    with pytest.raises(InputError, match="--layer-ids"):
        opened.read(tiny.flat(tmp_path / "b", eagle_config={}))
    assert opened.read(tmp_path / "b", [2, 3, 5]).aux_ids == [2, 3, 5]
    (tmp_path / "b" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no \.safetensors file"):
        opened.read(tmp_path / "b", [2, 3, 5])


def test_the_speculators_form_needs_a_verifiers_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--verifier"):
        export.export(opened.read(tiny.flat(tmp_path / "a")), tmp_path / "out", "speculators", "float32")
    assert not (tmp_path / "out").exists()


def test_a_verifiers_folder_that_is_not_there_is_no_name(tmp_path: Path) -> None:
    given = opened.read(tiny.flat(tmp_path / "a"))
    with pytest.raises(InputError, match=r"--verifier .*/absent: no config\.json there"):
        source.for_verifier(given, str(tmp_path / "absent"))


def test_sglang_needs_to_know_the_verifier(tmp_path: Path) -> None:
    given = opened.read(tiny.flat(tmp_path / "a"))
    with pytest.raises(InputError, match="--verifier"):
        export.export(given, tmp_path / "out", "flat", "float32", engine="sglang")
    (tmp_path / "llama").mkdir()
    shape = {"hidden_size": 8, "num_hidden_layers": 6, "vocab_size": 8, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(shape))
    known = source.for_verifier(given, str(tmp_path / "llama"))
    export.export(known, tmp_path / "out", "flat", "float32", engine="sglang")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
