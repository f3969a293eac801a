"""Both forms of an epoch: names, auxiliary ids, rope, maps; made again only when they must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from slipstream import rope
from slipstream.config import RopeScaling
from slipstream.drafter import export, opened
from slipstream.errors import Damaged, InputError
from tests.unit.drafter import tiny


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The checkpoint of epoch 3 in a drafter's folder."""
    return tiny.save(tmp_path / "checkpoints" / "3")


def exported(checkpoint: Path, dtype: Any = "float32", **options: Any) -> Path:
    """The exports of that epoch."""
    return export.export_epoch(checkpoint.parents[1], "3", dtype, **options)


def read(folder: Path) -> dict[str, Any]:
    """A folder's config."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_names_of_the_flat_form(checkpoint: Path) -> None:
    written = load_file(exported(checkpoint) / "flat" / "model.safetensors")
    expected = {"embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert written.keys() == expected | {f"midlayer.{name}" for name in tiny.LAYER}
    for name in tiny.LAYER:
        assert torch.equal(written[f"midlayer.{name}"], tiny.tensors()[f"layers.0.{name}"])


def test_names_of_the_speculators_form(checkpoint: Path) -> None:
    written = load_file(exported(checkpoint) / "speculators" / "model.safetensors")
    assert written.keys() == {*tiny.SHAPES, "d2t", "t2d"}
    assert all(torch.equal(written[name], tiny.tensors()[name]) for name in written)


def test_embeddings_are_left_out_when_servers_shall_share_the_verifiers(checkpoint: Path) -> None:
    folder = exported(checkpoint, embeddings=False)
    names = load_file(folder / "flat" / "model.safetensors").keys()
    assert "embed_tokens.weight" not in names
    assert {"lm_head.weight", "fc.weight", "norm.weight"} <= names
    assert "embed_tokens.weight" in load_file(folder / "speculators" / "model.safetensors")
    assert "share the verifier's" in (folder / "flat" / "README.md").read_text()
    assert "share the verifier's" not in (folder / "speculators" / "README.md").read_text()


def test_a_drafter_of_another_width_keeps_its_embedding(checkpoint: Path) -> None:
    """vLLM keeps the drafter's own where the widths differ, and nothing would have filled it."""
    tiny.save(checkpoint, tiny.config(target_hidden_size=16), tiny.tensors(**{"fc.weight": torch.ones(8, 48)}))
    with pytest.raises(InputError, match="8 wide and the verifier's embedding 16"):
        exported(checkpoint, embeddings=False)
    assert read(exported(checkpoint) / "flat")["target_hidden_size"] == 16


@pytest.mark.parametrize("form", ["flat", "speculators"])
def test_both_maps_are_inside_and_their_round_trip_is_exact(checkpoint: Path, form: str) -> None:
    """Field report 33: both maps inside model.safetensors, offsets, and exact after export and reading back."""
    folder = exported(checkpoint, "bfloat16") / form
    written = load_file(folder / "model.safetensors")
    assert written["d2t"].tolist() == [0, 0, 0, 2]
    assert (written["d2t"].dtype, written["t2d"].dtype) == (torch.int64, torch.bool)
    targets = torch.arange(4) + written["d2t"]
    assert targets.tolist() == [0, 1, 2, 5] == torch.nonzero(written["t2d"]).flatten().tolist()
    again = opened.read(folder)
    assert torch.equal(again.tensors["d2t"], tiny.D2T)
    assert torch.equal(again.tensors["t2d"], tiny.T2D)
    floats = [value for name, value in written.items() if name not in ("d2t", "t2d")]
    assert {value.dtype for value in floats} == {torch.bfloat16}


def test_absolute_ids_are_refused_with_both_values(checkpoint: Path) -> None:
    """Field report 33: [0, 1, 2, 5] as offsets points at token 8 of 8."""
    tiny.save(checkpoint, tensors=tiny.tensors(d2t=torch.tensor([0, 1, 2, 5])))
    with pytest.raises(Damaged, match=r"OFFSET"):
        exported(checkpoint)


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "output_norm.weight", "fc_norm.0.weight"])
def test_an_unknown_tensor_is_refused(checkpoint: Path, name: str) -> None:
    tiny.save(checkpoint, tensors=tiny.tensors(**{name: torch.ones(1)}))
    with pytest.raises(InputError, match=name):
        exported(checkpoint)


def test_auxiliary_ids_stand_twice(checkpoint: Path) -> None:
    written = read(exported(checkpoint) / "flat")
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert read(exported(checkpoint) / "speculators")["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]


def serving_side(states: list[float], ids: list[int]) -> list[float]:
    """What vLLM captures for `ids`: id k is the residual stream after k layers (EagleModelMixin, 0.32)."""
    return [states[k] for k in ids]


def test_exported_ids_name_the_states_that_were_trained_on(checkpoint: Path) -> None:
    """Field report 27: a toy verifier of six layers, whose layer i adds 10**i to its residual stream."""
    states = [0.0]
    for layer in range(6):
        states.append(states[-1] + 10**layer)
    tiny.save(checkpoint, tiny.config(eagle_aux_hidden_state_layer_ids=[1, 3, 5]))
    trained_on = [1.0, 111.0, 11111.0]  # hidden_states[1], [3], [5] of transformers
    for form in ("flat", "speculators"):
        ids = read(exported(checkpoint) / form)["eagle_aux_hidden_state_layer_ids"]
        assert serving_side(states, ids) == trained_on


@pytest.mark.parametrize(("ids", "says"), [([2, 3, 6], "6.*6 layers"), ([2, 3, 7], "7.*6 layers"), ([-1, 3, 5], "-1")])
def test_ids_that_are_no_auxiliary_layer_are_refused(
    checkpoint: Path, tmp_path: Path, ids: list[int], says: str
) -> None:
    """Field report 27: never a silent clamp; the verifier's folder says how many layers there are."""
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    (verifier / "config.json").write_text(
        json.dumps({"hidden_size": 8, "num_hidden_layers": 6, "vocab_size": 8, "model_type": "llama"})
    )
    named = {"verifier": {"name_or_path": str(verifier), "architectures": []}}
    tiny.save(checkpoint, tiny.config(eagle_aux_hidden_state_layer_ids=ids, speculators_config=named))
    with pytest.raises(InputError, match=says):
        exported(checkpoint)


ROPES = {
    "default": (50000.0, None),
    "linear": (10000.0, RopeScaling(rope_type="linear", factor=4.0)),
    "yarn": (
        50000.0,
        RopeScaling(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1),
    ),
    "llama3": (
        500000.0,
        RopeScaling(
            rope_type="llama3",
            factor=8.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_the_rope_comes_back_through_transformers_and_through_either_spelling(checkpoint: Path, name: str) -> None:
    theta, scaling = ROPES[name]
    parameters = rope.parameters(theta, scaling)
    tiny.save(checkpoint, tiny.config({"rope_parameters": parameters, "max_position_embeddings": 131072}))
    folder = exported(checkpoint)
    written = read(folder / "flat")
    loaded = AutoConfig.from_pretrained(folder / "flat")
    kept = {key: value for key, value in loaded.rope_parameters.items() if key in parameters}
    assert kept == parameters
    assert loaded.max_position_embeddings == 131072
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    new = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
    for spelling in (written, old, new, read(folder / "speculators")["transformer_layer_config"]):
        assert rope.read(spelling, "config.json") == (theta, scaling)


def test_the_config_is_one_that_transformers_reads(checkpoint: Path) -> None:
    read = AutoConfig.from_pretrained(exported(checkpoint) / "flat")
    assert read.architectures == ["LlamaForCausalLMEagle3"]
    assert (read.hidden_size, read.num_attention_heads, read.head_dim, read.vocab_size) == (8, 2, 4, 8)
    assert read.draft_vocab_size == 4
    assert read.dtype == torch.float32


def test_the_speculators_form_is_one_that_speculators_reads(checkpoint: Path) -> None:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    written = read(exported(checkpoint) / "speculators")
    config = Eagle3SpeculatorConfig(**written)
    assert config.eagle_aux_hidden_state_layer_ids == [2, 3, 5]
    assert config.speculators_config.verifier.name_or_path == "/nowhere/at/all/Kimi"
    assert config.transformer_layer_config.rms_norm_eps == 1e-05
    assert "auto_map" not in written, "it names code that is not in the folder"


def test_fields_left_at_their_defaults_are_spelled_out(checkpoint: Path) -> None:
    """speculators' file holds only what differs from LlamaConfig's defaults (rms_norm_eps 1e-6, 2048 positions)."""
    config = tiny.config()
    for name in ("rms_norm_eps", "max_position_embeddings"):
        del config["transformer_layer_config"][name]
    tiny.save(checkpoint, config)
    folder = exported(checkpoint)
    for written in (read(folder / "flat"), read(folder / "speculators")["transformer_layer_config"]):
        assert (written["rms_norm_eps"], written["max_position_embeddings"]) == (1e-6, 2048)


def test_norm_flags_reach_both_configs(checkpoint: Path) -> None:
    more = {"input_norm.weight": torch.ones(24)}
    tiny.save(checkpoint, tiny.config(norm_before_residual=True, norm_before_fc=True), tiny.tensors(**more))
    folder = exported(checkpoint)
    for form in ("flat", "speculators"):
        written = read(folder / form)
        assert (written["norm_before_residual"], written["norm_before_fc"]) == (True, True)
        assert not written.get("norm_output")
        assert "input_norm.weight" in load_file(folder / form / "model.safetensors")


def test_every_form_has_its_card(checkpoint: Path) -> None:
    folder = exported(checkpoint)
    for form, library in (("flat", "vllm"), ("speculators", "speculators")):
        front = (folder / form / "README.md").read_text().split("---")[1]
        assert yaml.safe_load(front)["library_name"] == library


def stamp(folder: Path) -> dict[str, int]:
    """The instant at which each file was written."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_whole_export_stays_as_it_is(checkpoint: Path) -> None:
    folder = exported(checkpoint)
    before = stamp(folder)
    assert exported(checkpoint) == folder
    assert stamp(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["3"]


def prune(checkpoint: Path) -> None:
    """Drops what retention drops: the large files."""
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pruned").touch()


def test_an_export_stays_when_its_checkpoint_was_dropped(checkpoint: Path) -> None:
    folder = exported(checkpoint)
    prune(checkpoint)
    before = stamp(folder)
    assert exported(checkpoint) == folder
    assert stamp(folder) == before


def test_a_damaged_flat_form_is_made_again_without_its_checkpoint(checkpoint: Path) -> None:
    folder = exported(checkpoint, "bfloat16")
    before = (folder / "flat" / "model.safetensors").read_bytes()
    prune(checkpoint)
    (folder / "flat" / "model.safetensors").write_bytes(b"")
    exported(checkpoint, "bfloat16")
    assert (folder / "flat" / "model.safetensors").read_bytes() == before


def test_what_cannot_be_made_again_is_said(checkpoint: Path) -> None:
    folder = exported(checkpoint)
    prune(checkpoint)
    (folder / "speculators" / "model.safetensors").write_bytes(b"")
    with pytest.raises(Damaged, match="keep_checkpoints"):
        exported(checkpoint)


def _new_checkpoint(checkpoint: Path, folder: Path) -> None:
    save_file(tiny.tensors(**{"norm.weight": torch.ones(8)}), checkpoint / "model.safetensors")


def _set_aside(checkpoint: Path, folder: Path) -> None:
    (folder / "speculators" / "model.safetensors").write_bytes(b"")


def _lost(checkpoint: Path, folder: Path) -> None:
    (folder / "flat" / "config.json").unlink()


def _half(checkpoint: Path, folder: Path) -> None:
    path = folder / "flat" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("happened", [_new_checkpoint, _set_aside, _lost, _half])
def test_an_export_is_made_again_when_it_must_be(checkpoint: Path, happened: Callable[[Path, Path], None]) -> None:
    folder = exported(checkpoint)
    before = stamp(folder)
    happened(checkpoint, folder)
    exported(checkpoint)
    assert stamp(folder).keys() == before.keys()
    assert all(stamp(folder)[name] > time for name, time in before.items())
    expected = load_file(checkpoint / "model.safetensors")["norm.weight"]
    assert torch.equal(load_file(folder / "flat" / "model.safetensors")["norm.weight"], expected)


def test_what_a_kill_left_is_no_export(checkpoint: Path) -> None:
    left = checkpoint.parents[1] / "epochs" / ".3.tmp" / "flat"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    folder = exported(checkpoint)
    assert [path.name for path in folder.parent.iterdir()] == ["3"]
    assert torch.equal(load_file(folder / "flat" / "model.safetensors")["d2t"], tiny.D2T)
