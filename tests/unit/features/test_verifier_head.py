"""Norm, head and embedding of a folder, against transformers' own forward pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pocket_states import POCKET, pocket, samples
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from slipstream.features import verifier_head
from slipstream.features.verifier_head import Unreadable, norm_eps, read_embedding, read_head

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
    ],
    ids=["llama", "tied", "gemma3"],
)
def test_the_head_is_transformers(tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_head, "BLOCK_ROWS", 7)  # a head is read in blocks
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
    assert norm_eps(POCKET) == json.loads((POCKET / "config.json").read_text())["text_config"]["rms_norm_eps"]


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


def _no_norm(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def _as_int8(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)


def _packed(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.qweight"] = tensors.pop("lm_head.weight")


def _narrow(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :8].contiguous()


def _capped(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["final_logit_softcapping"] = 30.0


def _layer_norm(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del config["rms_norm_eps"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_as_int8, "lm_head.weight is quantised"),
        (_packed, "the checkpoint has lm_head.qweight in its place"),
        (_narrow, "do not fit hidden_size 16"),
        (_capped, "final_logit_softcapping is 30.0"),
        (_layer_norm, "no RMS norm"),
        (_no_norm, "no model.norm.weight"),
    ],
)
def test_what_cannot_be_read_has_a_reason(tmp_path: Path, change: Any, reason: str) -> None:
    saved(tmp_path, LlamaConfig(**SMALL, tie_word_embeddings=False))
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Unreadable, match=reason):
        read_head(tmp_path)
