"""Norm, head and embedding of a folder, against transformers' own forward pass."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pocket_states import POCKET, pocket, samples
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GraniteConfig, LlamaConfig, models

from slipstream.verifier_ends import matrix, read_embedding, read_head
from slipstream.verifier_ends.head import ONE_PLUS

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
TOKENS = [3, 17, 4, 39]


def saved(folder: Path, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes a small model with a norm weight that is not 1; returns the state before its norm and its log-softmax."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.model.norm.weight.data.uniform_(0.3, 2)
    before: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: before.append(args[0].detach()[0]))
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    model.save_pretrained(folder)
    return before[0], torch.log_softmax(logits.float(), -1)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, tie_word_embeddings=False),
        LlamaConfig(**SMALL, tie_word_embeddings=True),
        Gemma3TextConfig(**SMALL, tie_word_embeddings=True),  # multiplies by 1 + weight
        Gemma2Config(**SMALL, final_logit_softcapping=0.5),  # logits here are about 0.6
        GraniteConfig(**SMALL, logits_scaling=8.0, tie_word_embeddings=False),
    ],
    ids=["llama", "tied", "gemma3", "capped", "scaled"],
)
def test_the_head_is_transformers(tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "BLOCK_ROWS", 7)  # a head is read in blocks
    state, expected = saved(tmp_path, config)
    head = read_head(tmp_path)
    assert torch.allclose(head.log_probabilities(head.normed(state)), expected, atol=1e-5)


def test_the_nested_and_prefixed_folder_of_kimi() -> None:
    tokens = samples()[0]
    state = torch.from_numpy(pocket().states(tokens, [6])[:, 0])
    head = read_head(POCKET)
    ours = head.log_probabilities(head.normed(state))
    for position, row in enumerate(pocket().logprobs(tokens)):
        for token, value in (row or {}).items():
            assert float(ours[position - 1, token]) == pytest.approx(value, abs=1e-5)
    assert head.eps == json.loads((POCKET / "config.json").read_text())["text_config"]["rms_norm_eps"]


def test_embedding_rows_are_id_0() -> None:
    tokens = samples()[0]
    rows = read_embedding(POCKET).take(tokens)
    assert torch.equal(rows, torch.from_numpy(pocket().states(tokens, [0])[:, 0]))


def test_prediction_layers_do_not_lend_their_norm(tmp_path: Path) -> None:
    """DeepSeek's multi-token prediction layer has a norm and a head of its own under a longer name."""
    state, expected = saved(tmp_path, LlamaConfig(**SMALL, tie_word_embeddings=False))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {
        "model.layers.2.shared_head.norm.weight": torch.zeros(16),
        "model.layers.2.embed_tokens.weight": torch.zeros(40, 16),
        "model.layers.2.shared_head.lm_head.weight": torch.zeros(40, 16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    head = read_head(tmp_path)
    assert torch.allclose(head.log_probabilities(head.normed(state)), expected, atol=1e-5)


def test_every_family_with_the_gemma_norm_is_known() -> None:
    """transformers' own modelling code: a final norm whose class multiplies by 1 + weight."""
    found: dict[str, set[str]] = {}
    for path in Path(models.__file__).parent.glob("*/modeling_*.py"):
        text = path.read_text()
        for norm, body in re.findall(r"\nclass (\w*RMSNorm)\(.*?\n(.*?)(?=\nclass |\Z)", text, re.DOTALL):
            if re.search(r"\(1(\.0)? \+ self\.weight", body) and f"self.norm = {norm}(config.hidden_size" in text:
                configuration = path.with_name(path.name.replace("modeling", "configuration")).read_text()
                found[path.parent.name] = set(re.findall(r'model_type = "(\w+)"', configuration))
    assert found.keys() >= {"gemma", "gemma2", "gemma3", "qwen3_next", "qwen3_5"}
    other = re.compile("vision|audio|encoder|module|decoder")
    missing = {
        family: kinds
        for family, kinds in found.items()
        if not {kind for kind in kinds if not other.search(kind)} <= ONE_PLUS and not family.startswith("t5gemma")
    }
    assert missing == {}
