"""The committed verifier: Kimi-K2.5's form, small, and right on prompts that it never saw."""

import json

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, DeepseekV3ForCausalLM

from slipstream.pocket import VERIFIER
from slipstream.pocket.curriculum import KINDS, generate
from slipstream.pocket.grading import grade
from slipstream.pocket.model import WEIGHTS_FILE, load_text_model, pack_experts, unpack_experts
from slipstream.pocket.traces import encode, pad_right


@pytest.fixture(scope="module")
def model() -> DeepseekV3ForCausalLM:
    return load_text_model(VERIFIER)


def test_the_config_is_kimis_with_a_nested_text_config() -> None:
    config = json.loads((VERIFIER / "config.json").read_text())
    text = config["text_config"]
    assert config["model_type"] == "kimi_k25"
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert (text["topk_method"], text["scoring_func"]) == ("noaux_tc", "sigmoid")
    assert (text["kv_lora_rank"], text["qk_rope_head_dim"]) == (512, 64)
    assert not text["tie_word_embeddings"]
    assert not config["tie_word_embeddings"]
    read = AutoConfig.from_pretrained(VERIFIER).text_config
    assert (read.hidden_size, read.num_hidden_layers, read.n_routed_experts) == (128, 6, 8)
    assert read.rope_parameters["rope_type"] == "yarn"


def test_weights_are_under_language_model_and_at_most_six_mebibytes() -> None:
    assert (VERIFIER / WEIGHTS_FILE).stat().st_size <= 6 * 2**20
    index = json.loads((VERIFIER / "model.safetensors.index.json").read_text())
    with safe_open(VERIFIER / WEIGHTS_FILE, framework="pt") as file:
        names = set(file.keys())
        size = sum(file.get_tensor(n).nbytes for n in names)
        expert = file.get_slice("language_model.model.layers.1.mlp.experts.7.down_proj.weight")
        assert expert.get_shape() == [128, 64]
        assert expert.get_dtype() == "BF16"
        assert "language_model.lm_head.weight" in names
    assert all(n.startswith("language_model.") for n in names)
    assert index["weight_map"] == dict.fromkeys(sorted(names), WEIGHTS_FILE)
    assert index["metadata"]["total_size"] == size


def test_experts_unpack_to_what_a_packed_layer_computes() -> None:
    gate_up, down = torch.randn(3, 8, 5), torch.randn(3, 5, 4)
    state = {"l.experts.gate_up_proj": gate_up, "l.experts.down_proj": down, "norm": torch.ones(5)}
    apart = unpack_experts(state)
    x = torch.randn(5)
    gate, up = (gate_up[2] @ x).chunk(2)
    assert torch.equal(apart["l.experts.2.gate_proj.weight"] @ x, gate)
    assert torch.equal(apart["l.experts.2.up_proj.weight"] @ x, up)
    together = pack_experts(apart)
    assert together.keys() == state.keys()
    assert all(torch.equal(together[k], state[k]) for k in state)


def test_every_expert_has_work(model: DeepseekV3ForCausalLM) -> None:
    """The balancing bias did its work: on real traces no expert gets under half an even share."""
    tokenizer = Tokenizer.from_file(str(VERIFIER / "tokenizer.json"))
    batch = pad_right(encode(tokenizer, generate(56, seed=1)), model.config.pad_token_id)
    real = (batch.ids != model.config.pad_token_id).flatten()
    chosen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers[1:]]
    hooks = [g.register_forward_hook(lambda _m, _i, out: chosen.append(out[2])) for g in gates]
    with torch.inference_mode():
        model(input_ids=batch.ids)
    for hook in hooks:
        hook.remove()
    assert len(chosen) == 5
    for indices in chosen:
        loads = torch.bincount(indices[real].flatten(), minlength=8) / indices[real].numel()
        assert loads.min() > 0.5 / 8


def test_held_out_prompts_are_answered_exactly(model: DeepseekV3ForCausalLM) -> None:
    tokenizer = Tokenizer.from_file(str(VERIFIER / "tokenizer.json"))
    grades = grade(model, tokenizer, generate(6 * len(KINDS), seed=77, held_out=True), rows=84)
    assert sum(g.tasks for g in grades.values()) == 6 * len(KINDS)
    assert sum(g.answers for g in grades.values()) >= 0.85 * 6 * len(KINDS)
    assert sum(g.outputs for g in grades.values()) >= 0.80 * 6 * len(KINDS)
