"""The decoder's configuration is the configured shape and no default of a library; its size is the published one."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.config import RunConfig, load_config
from slipstream.drafter import build, flat, opened, shape
from slipstream.drafter.job import Job
from slipstream.drafter.layer_config import layer_config
from slipstream.plan import plan

# names and shapes of the published Llama-type K2.5 drafter (AQ-MedAI): one layer that reads embedding and state
NAMES = {
    "embed_tokens.weight": (163840, 7168),
    "lm_head.weight": (32000, 7168),
    "fc.weight": (7168, 3 * 7168),
    "layers.0.self_attn.q_proj.weight": (64 * 128, 2 * 7168),
    "layers.0.self_attn.k_proj.weight": (64 * 128, 2 * 7168),
    "layers.0.self_attn.v_proj.weight": (64 * 128, 2 * 7168),
    "layers.0.self_attn.o_proj.weight": (7168, 64 * 128),
    "layers.0.mlp.gate_proj.weight": (18432, 7168),
    "layers.0.mlp.up_proj.weight": (18432, 7168),
    "layers.0.mlp.down_proj.weight": (7168, 18432),
    "layers.0.input_layernorm.weight": (7168,),
    "layers.0.hidden_norm.weight": (7168,),
    "layers.0.post_attention_layernorm.weight": (7168,),
    "norm.weight": (7168,),
    "d2t": (32000,),
    "t2d": (163840,),
}


def test_the_published_shape_for_kimi(root: Path) -> None:
    made = layer_config(shape.resolve(load_config(root / "deployments" / "kimi-k2.5-8gpu.yaml")), 7168, 163840)
    assert (made.hidden_size, made.vocab_size, made.num_hidden_layers) == (7168, 163840, 1)
    assert (made.num_attention_heads, made.num_key_value_heads, made.head_dim) == (64, 64, 128)
    assert (made.intermediate_size, made.rms_norm_eps, made.max_position_embeddings) == (18432, 1e-6, 262144)
    assert (made.tie_word_embeddings, made.attention_bias, made.mlp_bias) == (False, False, False)
    assert made.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize("theta", [10000.0, 50000.0])
def test_rope_is_the_configured_one(root: Path, theta: float) -> None:
    """theta ** (-2 i / head_dim), as in the RoFormer paper."""
    wanted = load_config(root / "deployments" / "pocket.yaml").drafter.shape.model_copy(update={"rope_theta": theta})
    made = layer_config(wanted, 128, 512)
    expected = [theta ** (-2 * i / wanted.head_dim) for i in range(wanted.head_dim // 2)]
    assert LlamaRotaryEmbedding(made).inv_freq.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def kimi_drafter(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The drafter of the reference job on the meta device: shapes without memory, no verifier but its config.json."""
    folder = tmp_path_factory.mktemp("kimi")
    published = resources.files("slipstream") / "verifiers" / "kimi-k2.5.json"
    (folder / "config.json").write_text(published.read_text())
    config = load_config(Path(__file__).parents[3] / "deployments" / "kimi-k2.5-8gpu.yaml")
    job = Job.model_construct(
        verifier=str(folder),
        shape=shape.resolve(config),
        drafter=config.drafter,
        hidden_size=7168,
        vocab_size=163840,
        layer_ids=[2, 30, 58],
    )
    with torch.device("meta"):
        return build.empty(job, config.vocabulary.size)


def test_names_and_shapes_are_the_published_ones(kimi_drafter: Any) -> None:
    """What is saved: without the copies of the verifier's head and norm that the loss needs."""
    kept = {name: tuple(value.shape) for name, value in kimi_drafter.state_dict().items() if "verifier" not in name}
    assert kept == NAMES
    assert kimi_drafter.lm_head.weight.device.type == "meta"


def test_its_flat_config_has_the_published_values(kimi_drafter: Any) -> None:
    """Every field that AQ-MedAI's config.json states, layer ids included."""
    published = json.loads((resources.files("slipstream") / "drafters" / "aq-medai-kimi-k2.5.json").read_text())
    said = opened.spelled_out(json.loads(kimi_drafter.config.to_json_string()), Path("config.json"))
    written = flat.config(said, "bfloat16", "config.json")
    for field, value in published.items():
        if field != "source":
            assert written[field] == value, field


@pytest.mark.parametrize(("train_lm_head", "trained"), [(True, 1_190.9), (False, 961.6)])
def test_counts_are_the_reference_runs(
    kimi_drafter: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_lm_head: bool, trained: float
) -> None:
    """2,594.7 M in all (the loss's copy of the head among them), 1,190.9 M trained with the head and 961.6 M without;
    `slipstream plan` counts the same, less the copy and the verifier's norm."""
    assert kimi_drafter.lm_head.weight.requires_grad  # by the job's train_lm_head
    monkeypatch.setattr(kimi_drafter.lm_head.weight, "requires_grad", train_lm_head)
    total = sum(each.numel() for each in kimi_drafter.parameters())
    learned = sum(each.numel() for each in kimi_drafter.parameters() if each.requires_grad)
    assert (round(total / 1e6, 1), round(learned / 1e6, 1)) == (2_594.7, trained)
    monkeypatch.chdir(tmp_path)
    config = load_config(root / "deployments" / "kimi-k2.5-8gpu.yaml")
    drafter = config.drafter.model_copy(update={"train_lm_head": train_lm_head})
    planned = plan(config.model_copy(update={"drafter": drafter, "workdir": str(tmp_path)}))["drafter_parameters"]
    assert planned == {"trained": learned, "total": total - 32000 * 7168 - 7168}


@pytest.mark.parametrize("norm", ["norm_before_fc", "fc_norm"])
def test_planned_parameters_with_extra_norms(make_config: Callable[..., RunConfig], norm: str) -> None:
    """speculators' input_norm is one over three states, its fc_norm three over one each."""
    plain = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 256}
    counted = [
        plan(make_config(prompts={"expected_prompts": 10}, drafter={"shape": fields}))["drafter_parameters"]["trained"]
        for fields in (plain, plain | {norm: True})
    ]
    assert counted[1] - counted[0] == 3 * 128
