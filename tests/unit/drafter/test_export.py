"""The flat form: names, auxiliary ids, rope, maps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from slipstream.drafter import export
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
    """A speculators checkpoint folder."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_names_of_the_flat_form() -> None:
    flat = export.flat_tensors(tensors(), "float32")
    expected = {"embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert flat.keys() == expected | {f"midlayer.{name}" for name in LAYER}
    for name in LAYER:
        assert torch.equal(flat[f"midlayer.{name}"], tensors()[f"layers.0.{name}"])


def test_maps_are_unchanged_and_floats_are_cast() -> None:
    flat = export.flat_tensors(tensors(), "bfloat16")
    assert torch.equal(flat["d2t"], D2T)
    assert torch.equal(flat["t2d"], T2D)
    assert (flat["d2t"].dtype, flat["t2d"].dtype) == (torch.int64, torch.bool)
    assert {value.dtype for name, value in flat.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}


@pytest.mark.parametrize(
    "name", ["layers.1.mlp.up_proj.weight", "output_norm.weight", "optimizer.step", "fc_norm.weight"]
)
def test_an_unknown_tensor_is_refused(name: str) -> None:
    with pytest.raises(Damaged, match=name):
        export.flat_tensors(tensors() | {name: torch.ones(1)}, "float32")


def test_absolute_ids_are_refused() -> None:
    with pytest.raises(Damaged, match="OFFSET"):
        export.flat_tensors(tensors() | {"d2t": torch.tensor([0, 1, 2, 5])}, "float32")


def test_auxiliary_ids_stand_twice_and_never_the_final_one() -> None:
    flat = export.flat_config(CONFIG, "float32")
    assert flat["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]


def test_rope_in_both_spellings() -> None:
    flat = export.flat_config(CONFIG, "float32")
    assert flat["rope_theta"] == flat["rope_parameters"]["rope_theta"] == 50000.0
    assert (flat["rope_scaling"], flat["rope_parameters"]["rope_type"]) == (None, "default")
    assert flat["max_position_embeddings"] == 4096


def test_a_rope_that_was_not_trained_is_refused() -> None:
    layer = CONFIG["transformer_layer_config"] | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}
    with pytest.raises(Damaged, match="yarn"):
        export.flat_config(CONFIG | {"transformer_layer_config": layer}, "float32")


def test_the_config_is_one_that_transformers_reads(checkpoint: Path, tmp_path: Path) -> None:
    export.export(checkpoint, tmp_path / "flat", "float32")
    read = AutoConfig.from_pretrained(tmp_path / "flat")
    assert read.architectures == ["LlamaForCausalLMEagle3"]
    assert (read.hidden_size, read.num_attention_heads, read.head_dim, read.vocab_size) == (8, 2, 4, 8)
    assert read.draft_vocab_size == 4
    assert read.rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}
    assert read.dtype == torch.float32


def test_the_written_weights(checkpoint: Path, tmp_path: Path) -> None:
    export.export(checkpoint, tmp_path / "flat", "bfloat16")
    read = load_file(tmp_path / "flat" / "model.safetensors")
    assert torch.equal(read["midlayer.mlp.up_proj.weight"], tensors()["layers.0.mlp.up_proj.weight"].bfloat16())
    assert torch.equal(read["d2t"], D2T)
    assert sorted(path.name for path in (tmp_path / "flat").iterdir()) == ["config.json", "model.safetensors"]


def test_fields_left_at_their_defaults_are_spelled_out(checkpoint: Path, tmp_path: Path) -> None:
    """speculators' file holds only what differs from LlamaConfig's defaults (rms_norm_eps 1e-6, 2048 positions)."""
    layer = {
        k: v
        for k, v in CONFIG["transformer_layer_config"].items()
        if k not in ("rms_norm_eps", "max_position_embeddings")
    }
    (checkpoint / "config.json").write_text(json.dumps(CONFIG | {"transformer_layer_config": layer}))
    export.export(checkpoint, tmp_path / "flat", "float32")
    written = json.loads((tmp_path / "flat" / "config.json").read_text())
    assert (written["rms_norm_eps"], written["max_position_embeddings"]) == (1e-6, 2048)
