"""What the servers' loaders read of an exported drafter: vLLM's own class does, SGLang's by its source."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import rope
from slipstream.config import RopeScaling
from slipstream.drafter import engines, export, opened
from slipstream.errors import InputError
from tests.conftest import ROOT

VERIFIER = ROOT / "slipstream" / "pocket" / "verifier"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 4.0}
YARN = RopeScaling(rope_type="yarn", factor=8.0, original_max_position_embeddings=512, beta_fast=32.0, beta_slow=1.0)


def drafter(folder: Path, layer: dict[str, Any] | None = None, **changes: Any) -> opened.Opened:
    """A speculators checkpoint for the pocket verifier (hidden 128, 512 tokens), its weights random."""
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 320,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        **dict.fromkeys(FLAGS, False),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": str(VERIFIER), "architectures": ["KimiK25ForConditionalGeneration"]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rms_norm_eps": 2e-6,
            "max_position_embeddings": 4096,
            "rope_parameters": rope.parameters(50000.0, None),
            **(layer or {}),
        },
    } | changes
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in opened.expected(config | _bare(config)).items()}
    t2d = torch.zeros(512, dtype=torch.bool)
    t2d[torch.randperm(512)[:320]] = True
    tensors |= {"t2d": t2d, "d2t": torch.nonzero(t2d).flatten() - torch.arange(320)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return opened.read(folder)


def _bare(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "transformer_layer_config": {"attention_bias": False, "mlp_bias": False, **config["transformer_layer_config"]}
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exported folders by name, and some that no exporter should make."""
    root = tmp_path_factory.mktemp("loaders")
    made: dict[str, Path] = {}

    def both(name: str, **changes: Any) -> opened.Opened:
        source = drafter(root / name / "checkpoint", **changes)
        for form in engines.FORMS:
            made[f"{name}/{form}"] = root / name / form
            export.write(source, root / name / form, form, "float32")
        return source

    plain = both("plain")
    both("norms", norm_before_residual=True, norm_before_fc=True, norm_output=True)
    both("fc_norm", fc_norm=True)
    both("yarn", layer={"rope_parameters": rope.parameters(50000.0, YARN)})
    both("four", eagle_aux_hidden_state_layer_ids=[1, 2, 3, 5])
    export.write(plain, root / "shared", "flat", "float32", embeddings=False)
    export.write(plain, root / "sglang", "flat", "float32", engine="sglang")
    made |= {"shared": root / "shared", "sglang": root / "sglang"}
    for name, change in {"renamed": ("midlayer.", "mid."), "headless": ("lm_head.", "head.")}.items():
        export.write(plain, root / name, "flat", "float32")
        kept = load_file(root / name / "model.safetensors")
        save_file({key.replace(*change): value for key, value in kept.items()}, root / name / "model.safetensors")
        made[name] = root / name
    return made


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What vLLM's class made of each (`loading_driver`); one process of the serve environment for all."""
    python = ROOT / ".venv-serve" / "bin" / "python"
    if not python.exists():
        pytest.skip("no serve environment here")
    line = [str(python), str(ROOT / "tests/contract/loading_driver.py"), str(VERIFIER), *map(str, folders.values())]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    results = [row for row in done.stdout.splitlines() if row.startswith("RESULT ")]
    assert results, done.stderr[-4000:]
    found = json.loads(results[0].removeprefix("RESULT "))
    return {name: found[str(path)] for name, path in folders.items()}


SERVED = ["plain", "norms", "fc_norm", "yarn"]


@pytest.mark.parametrize("name", [*(f"{name}/{form}" for name in SERVED for form in engines.FORMS), "four/flat"])
def test_vllm_consumes_every_tensor_and_fills_every_parameter(loaded: dict[str, dict[str, Any]], name: str) -> None:
    found = loaded[name]
    assert "error" not in found, found["error"]
    assert found["unloaded"] == []
    assert (found["own_embedding"], found["own_head"], found["draft_vocab"]) == (True, True, 320)
    assert found["class"] == "Eagle3LlamaForCausalLM"
    assert found["heads"] == [4, 2, 32]
    assert found["eps"] == 2e-6


@pytest.mark.parametrize("name", SERVED)
def test_vllm_makes_the_same_model_of_both_forms(loaded: dict[str, dict[str, Any]], name: str) -> None:
    flat, speculators = loaded[f"{name}/flat"], loaded[f"{name}/speculators"]
    assert flat["digest"] == speculators["digest"]
    assert {key: flat[key] for key in flat if key != "rope"} == {
        key: speculators[key] for key in speculators if key != "rope"
    }
    for found in (flat, speculators):
        assert rope.read({"rope_parameters": found["rope"]}, name) == (50000.0, YARN if name == "yarn" else None)
    assert flat["rope_class"] == ("YaRNScalingRotaryEmbedding" if name == "yarn" else "RotaryEmbedding")


@pytest.mark.parametrize("form", engines.FORMS)
def test_vllm_reads_the_norm_flags(loaded: dict[str, dict[str, Any]], form: str) -> None:
    def flags(name: str) -> list[bool]:
        return [loaded[f"{name}/{form}"][flag] for flag in FLAGS]

    assert flags("plain") == [False, False, False, False]
    assert flags("norms") == [True, True, False, True]
    assert flags("fc_norm") == [False, False, True, False]


@pytest.mark.parametrize("name", ["plain/flat", "plain/speculators", "sglang"])
def test_vllm_captures_the_exported_ids(loaded: dict[str, dict[str, Any]], name: str) -> None:
    assert loaded[name]["aux"] == [2, 3, 5]
    assert loaded[name]["states"] == 3


def test_vllm_shares_the_verifiers_embedding_when_there_is_none(loaded: dict[str, dict[str, Any]]) -> None:
    assert loaded["shared"]["own_embedding"] is False
    assert loaded["shared"]["own_head"] is True
    assert loaded["shared"]["unloaded"] == ["model.embed_tokens.weight"]


def test_what_is_refused_for_vllm_is_what_it_cannot_load(loaded: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Four auxiliary states: the flat form says their number, the speculators form has no place for it."""
    assert loaded["four/flat"]["states"] == 4
    assert "error" in loaded["four/speculators"]
    four = drafter(tmp_path / "four", eagle_aux_hidden_state_layer_ids=[1, 2, 3, 5])
    with pytest.raises(InputError, match="not for vllm: it takes three auxiliary states"):
        export.write(four, tmp_path / "out", "speculators", "float32", engine="vllm")


def test_the_check_sees_what_a_loader_would_lose(loaded: dict[str, dict[str, Any]]) -> None:
    """The same check on folders with other names: neither passes."""
    assert "error" in loaded["renamed"]
    assert "error" in loaded["headless"]


# SGLang, python/sglang/srt/models/llama_eagle3.py at 03d5a7771f: the parameters of LlamaForCausalLMEagle3, and in
# load_weights the stacked ones with the names that are loaded into them.
SGLANG_PARAMETERS = {
    "model.embed_tokens.weight",
    "model.fc.weight",
    "model.midlayer.self_attn.qkv_proj.weight",
    "model.midlayer.self_attn.o_proj.weight",
    "model.midlayer.mlp.gate_up_proj.weight",
    "model.midlayer.mlp.down_proj.weight",
    "model.midlayer.input_layernorm.weight",
    "model.midlayer.hidden_norm.weight",
    "model.midlayer.post_attention_layernorm.weight",
    "model.norm.weight",
    "lm_head.weight",
}
SGLANG_STACKED = {
    ".q_proj": ".qkv_proj",
    ".k_proj": ".qkv_proj",
    ".v_proj": ".qkv_proj",
    ".gate_proj": ".gate_up_proj",
    ".up_proj": ".gate_up_proj",
}
# What its constructor, LlamaDecoderLayer's (models/llama.py) and eagle_worker.py read of the config.
SGLANG_FIELDS = {
    *("architectures", "model_type", "vocab_size", "draft_vocab_size", "tie_word_embeddings", "hidden_size"),
    *("intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings", "attention_bias", "eagle_config"),
}
SGLANG_EAGLE_FIELDS = {"use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids"}


def sglang_loads(names: set[str]) -> dict[str, str | None]:
    """Where SGLang's load_weights puts each tensor; None: it skips it without a word."""

    def place(name: str) -> str | None:
        if "d2t" in name or "t2d" in name:
            return "hot_token_id" if "d2t" in name else "not needed"
        for part, stacked in SGLANG_STACKED.items():
            if part in name:
                name = name.replace(part, stacked)
                break
        return next((known for known in (name, f"model.{name}") if known in SGLANG_PARAMETERS), None)

    return {name: place(name) for name in names}


@pytest.mark.parametrize("name", ["plain/flat", "sglang"])
def test_sglang_finds_every_tensor_and_every_parameter(folders: dict[str, Path], name: str) -> None:
    placed = sglang_loads(set(load_file(folders[name] / "model.safetensors")))
    assert {name for name, where in placed.items() if where is None} == set(), "SGLang would skip these"
    assert SGLANG_PARAMETERS - set(placed.values()) == set(), "SGLang would leave these as they were made"
    assert placed["d2t"] == "hot_token_id"


def test_sglang_would_skip_what_is_refused_for_it(folders: dict[str, Path]) -> None:
    placed = sglang_loads(set(load_file(folders["norms/flat"] / "model.safetensors")))
    assert {name for name, where in placed.items() if where is None} == {"input_norm.weight"}
    speculators = sglang_loads(set(load_file(folders["plain/speculators"] / "model.safetensors")))
    assert speculators["layers.0.mlp.down_proj.weight"] is None


def test_sglang_takes_the_verifiers_embedding(folders: dict[str, Path]) -> None:
    """eagle_worker.py hands it over (`set_embed`) whatever the checkpoint holds."""
    placed = sglang_loads(set(load_file(folders["shared"] / "model.safetensors")))
    assert SGLANG_PARAMETERS - set(placed.values()) == {"model.embed_tokens.weight"}


def test_sglang_finds_every_field(folders: dict[str, Path]) -> None:
    written = json.loads((folders["plain/flat"] / "config.json").read_text())
    assert written.keys() >= SGLANG_FIELDS
    assert written["eagle_config"].keys() >= SGLANG_EAGLE_FIELDS
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["tie_word_embeddings"] is False
    assert "target_hidden_size" not in written  # SGLang takes it for the width as soon as it is there


def sglang_captures(ids: list[int], architecture: str) -> list[int]:
    """The layers before which SGLang captures, `set_eagle3_layers_to_capture` of three of its models.

    models/deepseek_v2.py since pull request 25454, models/gpt_oss.py since 32334, models/llama.py.
    """
    if architecture == "GptOssForCausalLM" or (architecture.startswith(("Deepseek", "Kimi")) and ids[0] != 1):
        return ids
    return [layer + 1 for layer in ids]


@pytest.mark.parametrize(
    ("architecture", "ids", "written"),
    [
        ("KimiK25ForConditionalGeneration", [2, 30, 58], [2, 30, 58]),
        ("DeepseekV3ForCausalLM", [3, 30, 58], [3, 30, 58]),
        ("GptOssForCausalLM", [1, 17, 32], [1, 17, 32]),
        ("LlamaForCausalLM", [2, 16, 29], [1, 15, 28]),
        ("Qwen3MoeForCausalLM", [2, 24, 45], [1, 23, 44]),
    ],
)
def test_sglang_captures_the_states_that_were_trained_on(architecture: str, ids: list[int], written: list[int]) -> None:
    """Field report 27: SGLang's id k is the output of layer k for most verifiers."""
    assert engines.sglang_ids(ids, [architecture], "") == written
    assert sglang_captures(written, architecture) == ids


def sglang_scale(parameters: dict[str, Any]) -> float:
    """`mscale` of SGLang's YaRNScalingRotaryEmbedding (srt/layers/rotary_embedding) with what get_rope passes on."""
    known = {name: parameters[name] for name in ("extrapolation_factor", "attn_factor") if name in parameters}
    return float((0.1 * math.log(parameters["factor"]) + 1.0) * known.get("attn_factor", 1.0))


@pytest.mark.parametrize("factor", [None, 1.0, 1.25])
def test_sglang_scales_yarn_as_in_training(tmp_path: Path, factor: float | None) -> None:
    """Kimi's and DeepSeek's scale is 1: SGLang would make it 0.1 ln(8) + 1; only its own export has `attn_factor`."""
    scaling = YARN.model_copy(update={"attention_factor": factor})
    source = drafter(tmp_path / "c", {"rope_parameters": rope.parameters(50000.0, scaling)})
    trained = 0.1 * math.log(8.0) + 1.0 if factor is None else factor
    for name, engine in (("plain", None), ("sglang", "sglang")):
        export.write(source, tmp_path / name, "flat", "float32", engine=engine)
        written = json.loads((tmp_path / name / "config.json").read_text())
        for spelling in ("rope_scaling", "rope_parameters"):
            assert ("attn_factor" in written[spelling]) is (factor is not None and name == "sglang")
            if name == "sglang":
                assert sglang_scale(written[spelling]) == pytest.approx(trained)
        assert rope.read(written, "it") == (50000.0, scaling)
    assert ("--engine sglang" in (tmp_path / "plain" / "README.md").read_text()) is (factor is not None)
    assert "--engine sglang" not in (tmp_path / "sglang" / "README.md").read_text()


def test_ids_that_sglang_cannot_be_told_are_refused() -> None:
    with pytest.raises(InputError, match=r"not for sglang.*\[1, 30, 58\]"):
        engines.sglang_ids([1, 30, 58], ["KimiK25ForConditionalGeneration"], "folder")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: drafter(folder, norm_before_residual=True), "norm_before_residual"),
        (lambda folder: drafter(folder, norm_before_fc=True), "norm_before_fc"),
        (lambda folder: drafter(folder, fc_norm=True), "fc_norm"),
        (lambda folder: drafter(folder, norm_output=True), "norm_output"),
        (lambda folder: drafter(folder, eagle_aux_hidden_state_layer_ids=[1, 2, 3, 5]), "three auxiliary states"),
        (lambda folder: drafter(folder, {"attention_bias": True}), "attention_bias"),
        (lambda folder: drafter(folder, {"rope_parameters": DYNAMIC}), "dynamic rope"),
    ],
)
def test_what_sglang_does_not_read_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], opened.Opened], says: str
) -> None:
    with pytest.raises(InputError, match=f"not for sglang: .*{says}"):
        export.write(make(tmp_path / "checkpoint"), tmp_path / "out", "flat", "float32", engine="sglang")
    assert not (tmp_path / "out").exists()


def test_the_speculators_form_is_refused_for_sglang(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not for sglang: it loads the flat form only"):
        export.write(drafter(tmp_path / "c"), tmp_path / "out", "speculators", "float32", engine="sglang")
