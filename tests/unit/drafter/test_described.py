"""What a drafter's config.json says, under the names of every form; what is no Llama-type EAGLE-3 is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafter import described, engines, opened
from slipstream.errors import InputError

LAYER: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "rms_norm_eps": 1e-5, "vocab_size": 512,
    "max_position_embeddings": 4096,
}  # fmt: skip
FLAT = LAYER | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "rope_theta": 5e5,
    "draft_vocab_size": 40,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]},
}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3DraftModel"],
    "transformer_layer_config": LAYER | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "draft_vocab_size": 40,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
}


def test_both_forms_say_the_same() -> None:
    flat, speculators = (described.of_config(config, "here") for config in (FLAT, SPECULATORS))
    assert flat == speculators
    assert (flat.hidden_size, flat.vocab_size, flat.draft_vocab_size, flat.layer_ids) == (64, 512, 40, [2, 3, 5])
    assert (flat.shape.head_dim, flat.shape.rms_norm_eps, flat.shape.rope_theta) == (32, 1e-5, 5e5)


@pytest.mark.parametrize("norm", engines.NORM_FLAGS)
@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_norm_options_stand_in_either_place(norm: str, place: str) -> None:
    config = FLAT | ({norm: True} if place == "top" else {"eagle_config": {norm: True}})
    read = described.of_config(config, "here").shape
    assert {name for name in engines.NORM_FLAGS if getattr(read, name)} == {norm}


def test_what_a_file_leaves_out_is_llamas_default() -> None:
    """transformers' LlamaConfig, which the engines read it with: one head's width from the others, 2,048 positions."""
    left = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "rope_theta", "eagle_config")
    read = described.of_config({name: value for name, value in FLAT.items() if name not in left}, "here")
    assert (read.shape.num_key_value_heads, read.shape.head_dim, read.shape.rms_norm_eps) == (4, 16, 1e-6)
    assert (read.shape.max_position_embeddings, read.shape.rope_theta, read.layer_ids) == (2048, 10000.0, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM of model_type 'llama' is not a Llama-type EAGLE-3"),
        ({"model_type": "qwen3"}, "of model_type 'qwen3'"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "MLA-type drafter, which speculators"),
        ({"kv_lora_rank": 512}, "MLA-type"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 2048}, "sees 2048 tokens"),
        ({"num_hidden_layers": 2}, "num_layers"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
    ],
)
def test_what_is_no_llama_type_eagle_3_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        described.of_config(FLAT | changes, "here")


def test_another_speculators_algorithm_is_refused() -> None:
    with pytest.raises(InputError, match="type 'dflash' where eagle3"):
        described.of_config(SPECULATORS | {"speculators_model_type": "dflash"}, "here")


@pytest.mark.parametrize(("text", "words"), [(None, "missing"), ("{", "cannot be read"), ("[]", "JSON object")])
def test_an_unreadable_file_is_one_sentence(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=words):
        described.read(tmp_path / "config.json")


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    assert described.read(tmp_path / "config.json").shape.intermediate_size == 96


def test_a_speculators_file_without_a_norm_option_has_it_off() -> None:
    """speculators 0.9.0's defaults; vLLM's are others (algos.py: norm_before_residual on), so they are spelled out."""
    assert {SPECULATORS[flag] for flag in engines.NORM_FLAGS if flag in SPECULATORS} == set()
    says = opened.spelled_out(SPECULATORS, Path("here"))
    assert {flag: says[flag] for flag in engines.NORM_FLAGS} == dict.fromkeys(engines.NORM_FLAGS, False)


@pytest.mark.parametrize("norm", engines.NORM_FLAGS)
def test_export_and_training_read_the_same_of_a_file_that_says_it_twice(norm: str) -> None:
    """vLLM asks `eagle_config` first (model_executor/models/llama_eagle3.py), so both do."""
    config = FLAT | {norm: False, "eagle_config": FLAT["eagle_config"] | {norm: True}}
    assert opened.spelled_out(config, Path("here"))[norm] is getattr(described.of_config(config, "here").shape, norm)
    assert opened.spelled_out(config, Path("here"))[norm] is True


def test_a_sliding_window_is_not_lost_in_an_export() -> None:
    """The flat form has no such field: exported without it the drafter would see tokens that it never saw."""
    sliding = {"layer_types": ["sliding_attention"], "sliding_window": 2048}
    with pytest.raises(InputError, match="sees 2048 tokens"):
        opened.spelled_out(FLAT | sliding, Path("here"))
    layer = SPECULATORS["transformer_layer_config"] | sliding
    own = opened.spelled_out(SPECULATORS | {"transformer_layer_config": layer}, Path("here"))
    assert "sees 2048" in str(engines.refusal(own, "flat", "vllm"))
