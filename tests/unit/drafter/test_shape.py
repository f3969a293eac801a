"""Which decoder a drafter gets: published ones by name, and for other verifiers one that inherits nothing wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.config import DraftShape, RopeScaling, RunConfig, load_config
from slipstream.drafter import shape
from slipstream.drafter.layer_config import layer_config, require_trained_shape
from slipstream.errors import InputError, StageFailed
from slipstream.plan import plan
from slipstream.verifier import shape_of

Make = Callable[..., RunConfig]
OWN = {"shape": None}
PUBLISHED = {
    "num_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "max_position_embeddings": 262144,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}


@pytest.mark.parametrize(("name", "intermediate"), [("aq-medai-kimi-k2.5", 18432), ("lightseekorg-kimi-k2.5", 12288)])
def test_published_drafters_for_kimi(name: str, intermediate: int) -> None:
    """Field values as published; 2,594.7 M parameters are those of the first (see test_build)."""
    found = shape.published(name)
    assert found.shape.model_dump() == PUBLISHED | {"intermediate_size": intermediate}
    assert (found.hidden_size, found.vocab_size, found.draft_vocab_size) == (7168, 163840, 32000)
    assert found.layer_ids == [2, 30, 58]


def test_the_mla_drafter_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match=r"Eagle3DeepseekV2ForCausalLM is an MLA-type drafter, which speculators 0\.9"):
        shape.published("lightseekorg-kimi-k2.5-mla")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'kimi'; known are aq-medai-kimi-k2\.5, lightseekorg-kimi-k2\.5"):
        shape.published("kimi")


def test_a_published_drafter_for_another_hidden_size_is_refused(make_config: Make) -> None:
    config = make_config(drafter=OWN | {"published": "aq-medai-kimi-k2.5"})
    with pytest.raises(InputError, match=r"hidden_size 7168 is for another verifier than .* with 128"):
        shape.resolve(config)


def test_the_reference_job_takes_the_published_shape(root: Path) -> None:
    config = load_config(root / "deployments" / "kimi-k2.5-8gpu.yaml")
    assert shape.resolve(config).model_dump() == PUBLISHED | {"intermediate_size": 18432}


# model type, the fields that must not reach the drafter, and theta, scaling, positions that must; published values
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"],
        "intermediate_size": 2880, "max_position_embeddings": 131072, "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False,
        },
    },
    "gemma-3-27b": {
        "model_type": "gemma3_text", "hidden_size": 5376, "head_dim": 128, "query_pre_attn_scalar": 168,
        "num_attention_heads": 32, "num_key_value_heads": 16, "sliding_window": 1024, "intermediate_size": 21504,
        "max_position_embeddings": 131072, "rope_theta": 1000000, "rope_local_base_freq": 10000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe", "hidden_size": 4096, "head_dim": 128, "num_attention_heads": 64,
        "num_key_value_heads": 4, "intermediate_size": 12288, "moe_intermediate_size": 1536, "sliding_window": None,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rope_scaling": None,
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip
# heads of 128: the hidden size over 128, up to the next multiple of eight
HEADS = {"DeepSeek-V3": 56, "gpt-oss-120b": 24, "gemma-3-27b": 48, "Qwen3-235B-A22B": 32, "Llama-3.1-8B": 32}


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_get_a_decoder_of_their_own(name: str) -> None:
    text = FAMILIES[name]
    made = shape.from_verifier(shape_of(text | {"num_hidden_layers": 36, "vocab_size": 1000}, "config.json"))
    assert (made.num_attention_heads, made.num_key_value_heads, made.head_dim) == (HEADS[name], 8, 128)
    assert made.intermediate_size == 3 * text["hidden_size"]
    assert made.max_position_embeddings == text["max_position_embeddings"]
    assert made.rope_theta == text["rope_theta"]
    config = layer_config(made, text["hidden_size"], 32)
    assert not hasattr(config, "sliding_window")
    assert getattr(config, "layer_types", None) is None
    given = {"head_dim": 128, "max_position_embeddings": text["max_position_embeddings"]}
    given |= {field: text[field] for field in ("rope_theta", "rope_scaling")}
    ours, theirs = LlamaRotaryEmbedding(config), LlamaRotaryEmbedding(LlamaConfig(**given))
    assert ours.inv_freq.tolist() == theirs.inv_freq.tolist()
    assert ours.attention_scaling == theirs.attention_scaling


@pytest.mark.parametrize(
    ("hidden", "heads"),
    [(1024, 8), (1152, 16), (2048, 16), (2560, 32), (4608, 48), (5120, 40), (6656, 64), (12288, 96)],
)
def test_heads_divide_the_hidden_size(hidden: int, heads: int) -> None:
    """transformers refuses another number; 2560 (Qwen3-4B) over 24 or 4608 (Gemma 2 27B) over 40 would not go."""
    text = FAMILIES["Llama-3.1-8B"] | {"num_hidden_layers": 36, "vocab_size": 1000, "hidden_size": hidden}
    made = shape.from_verifier(shape_of(text, "config.json"))
    assert (made.num_attention_heads, made.num_key_value_heads, made.head_dim) == (heads, 8, 128)
    layer_config(made, hidden, 1000)


def test_no_heads_that_divide_is_one_sentence() -> None:
    text = FAMILIES["Llama-3.1-8B"] | {"num_hidden_layers": 36, "vocab_size": 1000, "hidden_size": 1027}
    with pytest.raises(InputError, match=r"config\.json: hidden_size 1027 .*set drafter\.shape"):
        shape.from_verifier(shape_of(text, "config.json"))


def test_configured_heads_that_do_not_divide_are_refused(make_config: Make) -> None:
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32, "intermediate_size": 8}
    with pytest.raises(InputError, match="num_attention_heads 3 do not divide hidden_size 128"):
        shape.resolve(make_config(drafter={"shape": heads}))


def test_a_small_verifier_gets_four_heads(make_config: Make) -> None:
    """The pocket verifier's MLA dims (nope 32, rope 64, v 32) and its experts' width of 64 do not show."""
    made = shape.resolve(make_config(drafter=OWN))
    assert (made.num_attention_heads, made.num_key_value_heads, made.head_dim) == (4, 4, 32)
    assert (made.intermediate_size, made.rope_theta, made.max_position_embeddings) == (384, 50000.0, 4096)
    assert made.rope_scaling is not None
    assert (made.rope_scaling.rope_type, made.rope_scaling.factor) == ("yarn", 8.0)


YARN = {"type": "yarn", "factor": 32, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("spelling", ["old", "new"])
def test_rope_and_positions_are_the_verifiers(make_config: Make, tmp_path: Path, nested: bool, spelling: str) -> None:
    """Field report 41: yarn factor 32 over 4096, theta 50000, 131072 positions; no short default, nothing lost."""
    text: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 6, "vocab_size": 512, "model_type": "kimi_k2"}
    text |= {"max_position_embeddings": 131072}
    if spelling == "old":
        text |= {"rope_scaling": YARN, "rope_theta": 50000}
    else:
        new = {name: value for name, value in YARN.items() if name != "type"}
        text |= {"rope_parameters": new | {"rope_type": "yarn", "rope_theta": 50000}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text} if nested else text))
    made = shape.resolve(make_config(drafter=OWN, verifier={"path": str(tmp_path)}))
    assert (made.rope_theta, made.max_position_embeddings) == (50000.0, 131072)
    config = layer_config(made, 128, 512)
    assert config.max_position_embeddings == 131072
    assert config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
    }


def test_contexts_beyond_the_drafters_positions_are_refused() -> None:
    """Field report 41: a drafter of 2,048 positions under contexts of 4,096."""
    short = DraftShape.model_validate(PUBLISHED | {"intermediate_size": 8, "max_position_embeddings": 2048})
    with pytest.raises(InputError, match=r"contexts of 4096 tokens go beyond .*max_position_embeddings 2048"):
        shape.require_positions(4096, short, "epochs/1/config.json")
    shape.require_positions(2048, short, "epochs/1/config.json")


def test_a_warm_start_lends_its_shape(make_config: Make, tmp_path: Path) -> None:
    """Nothing configured: what starts from a checkpoint can only have its decoder."""
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 128}
    fields |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"eagle_config": {"norm_before_fc": True}}))
    made = shape.resolve(make_config(drafter=OWN | {"init_from": str(tmp_path)}))
    assert (made.num_attention_heads, made.num_key_value_heads, made.head_dim) == (2, 2, 64)
    assert (made.intermediate_size, made.norm_before_fc, made.max_position_embeddings) == (96, True, 2048)


FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 256, "vocab_size": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 50000.0, "max_position_embeddings": 4096,
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
}  # fmt: skip
TRAINED = DraftShape(
    num_attention_heads=4, num_key_value_heads=4, head_dim=32, intermediate_size=256, rms_norm_eps=1e-6,
    rope_theta=50000.0, max_position_embeddings=4096,
    rope_scaling=RopeScaling(rope_type="yarn", factor=8.0, original_max_position_embeddings=512),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": None}, "rope_scaling None instead of .*yarn"),
        ({"rope_theta": 10000.0}, "rope_theta 10000.0 instead of 50000.0"),
        ({"max_position_embeddings": 2048}, "max_position_embeddings 2048 instead of 4096"),
        ({"norm_before_residual": True}, "norm_before_residual True instead of False"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 instead of 1e-06"),
    ],
)
def test_an_export_that_says_another_decoder_ends_the_stage(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    require_trained_shape(tmp_path / "config.json", TRAINED)
    (tmp_path / "config.json").write_text(json.dumps(FLAT | changes))
    with pytest.raises(StageFailed, match=words):
        require_trained_shape(tmp_path / "config.json", TRAINED)


def test_planning_needs_no_verifier(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The shape is made from the published verifier's while its folder is absent."""
    monkeypatch.chdir(tmp_path)
    config = load_config(root / "deployments" / "kimi-k2.5-8gpu.yaml")
    own = config.drafter.model_copy(update={"published": None})
    config = config.model_copy(update={"drafter": own, "workdir": str(tmp_path)})
    made = shape.resolve(config)
    assert (made.num_attention_heads, made.intermediate_size, made.max_position_embeddings) == (56, 21504, 262144)
    assert plan(config)["drafter_parameters"]["trained"] > 0
