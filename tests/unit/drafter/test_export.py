"""Both forms of an epoch: names, auxiliary ids, rope, maps; made again only when they must be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from slipstream.drafter import export, flat
from slipstream.errors import Damaged

T2D = torch.tensor([True, True, True, False, False, True, False, False])
D2T = torch.tensor([0, 0, 0, 2])
LAYER = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "hidden_norm.weight",
    "post_attention_layernorm.weight",
)
CONFIG: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 4,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 4096,
        "vocab_size": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
}


def tensors() -> dict[str, torch.Tensor]:
    """A speculators checkpoint in miniature: every tensor holds a value of its own."""
    names = ["embed_tokens.weight", "fc.weight", *(f"layers.0.{name}" for name in LAYER), "norm.weight"]
    names += ["lm_head.weight", "verifier_norm.weight", "verifier_lm_head.weight"]
    return {name: torch.full((2, 3), float(i + 1)) for i, name in enumerate(names)} | {"d2t": D2T, "t2d": T2D}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The checkpoint of epoch 3 in a drafter's folder."""
    folder = tmp_path / "checkpoints" / "3"
    folder.mkdir(parents=True)
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_names_of_the_flat_form() -> None:
    names = flat.tensors(tensors())
    expected = {"embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert names.keys() == expected | {f"midlayer.{name}" for name in LAYER}
    for name in LAYER:
        assert torch.equal(names[f"midlayer.{name}"], tensors()[f"layers.0.{name}"])


def test_embeddings_are_left_out_when_servers_shall_share_the_verifiers() -> None:
    assert tensors().keys() >= {"embed_tokens.weight"}
    without = flat.tensors(tensors(), embeddings=False)
    assert flat.tensors(tensors()).keys() - without.keys() == {"embed_tokens.weight"}


def test_maps_are_unchanged_and_floats_are_cast() -> None:
    written = export.cast(tensors(), "bfloat16")
    assert torch.equal(written["d2t"], D2T)
    assert torch.equal(written["t2d"], T2D)
    assert (written["d2t"].dtype, written["t2d"].dtype) == (torch.int64, torch.bool)
    assert {value.dtype for name, value in written.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "output_norm.weight", "optimizer.step"])
def test_an_unknown_tensor_is_refused(name: str) -> None:
    with pytest.raises(Damaged, match=name):
        flat.tensors(tensors() | {name: torch.ones(1)})


def test_absolute_ids_are_refused() -> None:
    with pytest.raises(Damaged, match="OFFSET"):
        flat.tensors(tensors() | {"d2t": torch.tensor([0, 1, 2, 5])})


def test_auxiliary_ids_stand_twice() -> None:
    written = flat.config(CONFIG, "float32")
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]


def test_rope_in_both_spellings() -> None:
    written = flat.config(CONFIG, "float32")
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 50000.0
    assert (written["rope_scaling"], written["rope_parameters"]["rope_type"]) == (None, "default")
    assert written["max_position_embeddings"] == 4096


def test_the_config_is_one_that_transformers_reads(checkpoint: Path) -> None:
    folder = export.export_epoch(checkpoint.parents[1], "3", "float32") / "flat"
    read = AutoConfig.from_pretrained(folder)
    assert read.architectures == ["LlamaForCausalLMEagle3"]
    assert (read.hidden_size, read.num_attention_heads, read.head_dim, read.vocab_size) == (8, 2, 4, 8)
    assert read.draft_vocab_size == 4
    assert read.rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}
    assert read.dtype == torch.float32


def test_the_written_weights_of_both_forms(checkpoint: Path) -> None:
    folder = export.export_epoch(checkpoint.parents[1], "3", "bfloat16")
    for form, name in (("flat", "midlayer.mlp.up_proj.weight"), ("speculators", "layers.0.mlp.up_proj.weight")):
        read = load_file(folder / form / "model.safetensors")
        assert torch.equal(read[name], tensors()["layers.0.mlp.up_proj.weight"].bfloat16())
        assert torch.equal(read["d2t"], D2T)
        assert torch.equal(read["t2d"], T2D)
        assert not any(name.startswith("verifier_") for name in read)


def test_fields_left_at_their_defaults_are_spelled_out(checkpoint: Path) -> None:
    """speculators' file holds only what differs from LlamaConfig's defaults (rms_norm_eps 1e-6, 2048 positions)."""
    layer = {
        k: v
        for k, v in CONFIG["transformer_layer_config"].items()
        if k not in ("rms_norm_eps", "max_position_embeddings")
    }
    (checkpoint / "config.json").write_text(json.dumps(CONFIG | {"transformer_layer_config": layer}))
    folder = export.export_epoch(checkpoint.parents[1], "3", "float32")
    for path, inside in (("flat", None), ("speculators", "transformer_layer_config")):
        written = json.loads((folder / path / "config.json").read_text())
        written = written[inside] if inside else written
        assert (written["rms_norm_eps"], written["max_position_embeddings"]) == (1e-6, 2048)


def stamp(folder: Path) -> dict[str, int]:
    """The instant at which each file was written."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_whole_export_stays_as_it_is(checkpoint: Path) -> None:
    folder = export.export_epoch(checkpoint.parents[1], "3", "float32")
    before = stamp(folder)
    assert export.export_epoch(checkpoint.parents[1], "3", "float32") == folder
    assert stamp(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["3"]


def test_an_export_stays_when_its_checkpoint_is_gone(checkpoint: Path) -> None:
    folder = export.export_epoch(checkpoint.parents[1], "3", "float32")
    shutil.rmtree(checkpoint)
    before = stamp(folder)
    assert export.export_epoch(checkpoint.parents[1], "3", "float32") == folder
    assert stamp(folder) == before


def _new_checkpoint(checkpoint: Path, folder: Path) -> None:
    save_file(tensors() | {"norm.weight": torch.ones(2, 3)}, checkpoint / "model.safetensors")


def _set_aside(checkpoint: Path, folder: Path) -> None:
    (folder / "speculators" / "model.safetensors").write_bytes(b"")


def _lost(checkpoint: Path, folder: Path) -> None:
    (folder / "flat" / "config.json").unlink()


def _half(checkpoint: Path, folder: Path) -> None:
    path = folder / "flat" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("happened", [_new_checkpoint, _set_aside, _lost, _half])
def test_an_export_is_made_again_when_it_must_be(checkpoint: Path, happened: Callable[[Path, Path], None]) -> None:
    folder = export.export_epoch(checkpoint.parents[1], "3", "float32")
    before = stamp(folder)
    happened(checkpoint, folder)
    export.export_epoch(checkpoint.parents[1], "3", "float32")
    assert stamp(folder).keys() == before.keys()
    assert all(stamp(folder)[name] > time for name, time in before.items())
    expected = load_file(checkpoint / "model.safetensors")["norm.weight"]
    assert torch.equal(load_file(folder / "flat" / "model.safetensors")["norm.weight"], expected)


def test_what_a_kill_left_is_no_export(checkpoint: Path) -> None:
    left = checkpoint.parents[1] / "epochs" / ".3.tmp" / "flat"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    folder = export.export_epoch(checkpoint.parents[1], "3", "float32")
    assert [path.name for path in folder.parent.iterdir()] == ["3"]
    assert torch.equal(load_file(folder / "flat" / "model.safetensors")["d2t"], D2T)
