"""The rope of training is that of serving: transformers' on the decoder's configuration, vLLM's on the exported one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.config import DrafterConfig, DraftShape
from slipstream.drafter import build, flat, shape
from slipstream.drafter.job import Job
from slipstream.drafter.layer_config import layer_config, require_trained_shape
from slipstream.verifier import published_shape

ROOT = Path(__file__).parents[2]
SERVE = ROOT / ".venv-serve" / "bin" / "python"
POSITIONS = [0, 1, 2, 17, 511, 512, 1000, 4095]  # before and beyond what each was scaled from
ATOL = 1e-3  # 4095 radians in float32 are known to 2.4e-4
PLAIN: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 256,
    "max_position_embeddings": 4096,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
VERIFIERS = ("kimi-k2.5", "deepseek-v3", "gpt-oss-120b", "gemma-3-27b-it", "llama-3.1-8b-instruct")
CASES = {
    "default": DraftShape(**PLAIN, rope_theta=50000.0),
    "linear": DraftShape(**PLAIN, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "dynamic": DraftShape(**PLAIN, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    "llama3": DraftShape(**PLAIN, rope_theta=5e5, rope_scaling=LLAMA3),
    "llama4": DraftShape(**PLAIN, rope_theta=5e5, rope_scaling=LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0}),
    "yarn": DraftShape(**PLAIN, rope_theta=50000.0, rope_scaling=YARN),
    "yarn-betas": DraftShape(**PLAIN, rope_scaling=YARN | {"beta_fast": 24.0, "beta_slow": 2.0, "truncate": False}),
    "yarn-attention": DraftShape(**PLAIN, rope_scaling=YARN | {"attention_factor": 1.0}),
    "published": shape.published("aq-medai-kimi-k2.5").shape,
    **{name: shape.from_verifier(published_shape(name)) for name in VERIFIERS},
}


def width(name: str) -> int:
    """The hidden size of a case."""
    return published_shape(name).hidden_size if name in VERIFIERS else 7168 if name == "published" else 128


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """[cos | sin] by case as vLLM computes them from the flat config.json, float32 [positions, head_dim]."""
    home = tmp_path_factory.mktemp("rope")
    for name, wanted in CASES.items():
        job = Job.model_construct(
            verifier=str(ROOT / "slipstream/pocket/verifier"),
            shape=wanted,
            drafter=DrafterConfig(devices=[]),
            hidden_size=width(name),
            vocab_size=512,
            layer_ids=[2, 3, 5],
        )
        said = json.loads(build.drafter_config(job, 320).to_json_string())
        said["transformer_layer_config"] = layer_config(wanted, width(name), 512).to_dict()
        (home / name).mkdir()
        (home / name / "config.json").write_text(json.dumps(flat.config(said, "float32", name)))
    line = [str(SERVE), str(Path(__file__).with_name("rope_driver.py")), str(home / "out.npz")]
    line += [",".join(map(str, POSITIONS)), *(str(home / name) for name in CASES)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"VLLM_CACHE_ROOT": str(home / "cache"), "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, wanted in CASES.items():
        require_trained_shape(home / name / "config.json", wanted)
    with np.load(home / "out.npz") as held:
        return {name: held[name] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_served_angles_are_the_trained_ones(served: dict[str, np.ndarray], name: str) -> None:
    trained = LlamaRotaryEmbedding(layer_config(CASES[name], width(name), 512))
    cos, sin = trained(torch.zeros(1), torch.tensor([POSITIONS]))
    half = CASES[name].head_dim // 2
    expected = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).numpy()
    np.testing.assert_allclose(served[name], expected, rtol=0, atol=ATOL)


def test_another_rope_would_show(served: dict[str, np.ndarray]) -> None:
    """A lost scaling, a lost theta, a lost scale of the attention: each is far beyond the tolerance."""
    for one, other in (("yarn", "default"), ("default", "linear"), ("yarn", "yarn-attention"), ("llama3", "default")):
        assert np.abs(served[one] - served[other]).max() > 0.05
