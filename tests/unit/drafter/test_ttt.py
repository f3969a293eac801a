"""The fast forward pass against speculators' own: the same loss, gradients and accuracies, in float32."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from slipstream.config import DrafterConfig
from slipstream.drafter import compute, ttt
from slipstream.drafter.ttt_attention import Layout, attend
from slipstream.drafter.verifier_parts import CappedHead
from slipstream.errors import InputError

HIDDEN, VOCABULARY, DRAFT, TOKENS = 32, 48, 24, 40


def make(kv_heads: int = 2, **options: Any) -> Any:
    """A small drafter of random weights whose head is trained too."""
    layer = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=options.pop("layers", 1),
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    cap = options.pop("cap", None)
    layer._attn_implementation = "eager"
    proposal = [GreedyTokenProposalConfig(speculative_tokens=3)]
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=proposal,
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **options,
    )
    torch.manual_seed(1)
    model = Eagle3DraftModel(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3).add_(parameter.ndim == 1)
    model.lm_head.weight.requires_grad_(True)
    if cap is not None:
        model.verifier_lm_head = CappedHead(model.verifier_lm_head, cap)
    return model


def packed(lengths: tuple[int, ...] = (13, 9, 12)) -> dict[str, torch.Tensor]:
    """Documents of these lengths with two tokens of prompt each, and padding up to `TOKENS`."""
    torch.manual_seed(2)
    documents = torch.full((TOKENS,), -1)
    positions, mask = torch.zeros(TOKENS, dtype=torch.long), torch.zeros(TOKENS, dtype=torch.bool)
    start = 0
    for number, length in enumerate(lengths):
        documents[start : start + length] = number
        positions[start : start + length] = torch.arange(1, length + 1)
        mask[start + 2 : start + length] = True
        start += length
    return {
        "hidden_states": torch.randn(1, TOKENS, 3 * HIDDEN),
        "input_ids": torch.randint(0, VOCABULARY, (1, TOKENS)),
        "document_ids": documents[None],
        "loss_mask": mask[None],
        "position_ids": positions[None],
        "verifier_last_hidden_states": torch.randn(1, TOKENS, HIDDEN),
    }


def outcome(model: Any, batch: dict[str, torch.Tensor], **wanted: Any) -> tuple[float, dict, dict]:
    """Loss, gradients by name, metrics."""
    model.zero_grad(set_to_none=True)
    loss_config = resolve_loss_config(wanted.pop("loss", "kl_div"), "eager")
    _, loss, metrics = model(**batch, loss_config=loss_config, **wanted)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {}),
        ({"kv_heads": 4}, {"ttt_steps": 1}),
        ({"kv_heads": 1}, {"ttt_steps": 5, "ttt_step_loss_decay": 0.7}),
        ({"norm_before_residual": True}, {"loss": "ce"}),
        ({"norm_before_fc": True}, {"loss": json.dumps({"ce": 0.3, "kl_div": 0.7})}),
        ({"fc_norm": True, "norm_output": True}, {"loss": "tv"}),
        ({"cap": 0.5}, {}),
    ],
)
def test_loss_and_gradients_are_speculators(options: dict[str, Any], wanted: dict[str, Any]) -> None:
    model, batch = make(**options), packed()
    loss, gradients, metrics = outcome(model, batch, **wanted)
    ttt.install(model)
    fast_loss, fast_gradients, fast_metrics = outcome(model, batch, **wanted)
    assert fast_loss == pytest.approx(loss, rel=1e-5)
    assert fast_gradients.keys() == gradients.keys()
    for name, expected in gradients.items():
        error = (fast_gradients[name] - expected).norm() / expected.norm()
        assert error < 1e-4, (name, float(error))
    assert fast_metrics.keys() == metrics.keys()
    for name, expected in metrics.items():
        if "acc" not in name:
            assert fast_metrics[name] == pytest.approx(expected, rel=1e-5), name


def test_accuracies_are_speculators_on_one_document() -> None:
    """With several documents speculators' chains run on into the next one's prompt."""
    model, batch = make(), packed((TOKENS,))
    batch["verifier_last_hidden_states"] = batch["verifier_last_hidden_states"].roll(1, 1).clone()
    *_, metrics = outcome(model, batch)
    ttt.install(model)
    *_, fast = outcome(model, batch)
    assert metrics["full_acc_0_sum"] > 0
    for name in metrics:
        if "full_acc" in name or name.endswith("cond_acc_0_sum"):
            assert fast[name] == metrics[name], name


def test_a_batch_without_supervised_tokens_has_no_loss() -> None:
    model, batch = make(), packed()
    batch["loss_mask"][:] = False
    ttt.install(model)
    loss, gradients, metrics = outcome(model, batch)
    assert loss == 0
    assert all(bool((gradient == 0).all()) for gradient in gradients.values())
    assert metrics["full_acc_0_total"] == 0


def test_drafted_keys_are_seen_by_their_own_position_only() -> None:
    """Against softmax over one explicit mask, as speculators builds it, with autograd's own gradients."""
    torch.manual_seed(0)
    tokens, heads, key_heads, dim = 10, 4, 2, 8
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    tensors = [torch.randn(tokens, heads, dim, dtype=torch.float64, requires_grad=True)]
    tensors += [torch.randn(tokens, key_heads, dim, dtype=torch.float64, requires_grad=True) for _ in range(6)]
    query, *rest = tensors
    keys, values = rest[:3], rest[3:]
    place = torch.arange(tokens)
    true = (documents[:, None] == documents) & (place[:, None] >= place)
    seen = torch.cat([true, *[torch.eye(tokens, dtype=torch.bool)] * 2], dim=1)
    wide = [torch.cat([part.repeat_interleave(2, dim=1) for part in parts]) for parts in (keys, values)]
    scores = torch.einsum("qhd,khd->hqk", query, wide[0]) * 0.3
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), wide[1])
    pull = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * pull).sum(), tensors)
    ours = attend(query, keys, values, Layout.of(documents, torch.device("cpu")), 0.3)
    found = torch.autograd.grad((ours * pull).sum(), tensors)
    assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_drafter_of_two_layers_keeps_speculators_pass() -> None:
    with pytest.raises(InputError, match="2 layers"):
        ttt.install(make(layers=2))


def test_fp8_without_torchao_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8.config", None)
    with pytest.raises(InputError, match=r"fp8_linears.*torchao"):
        ttt.install(make(), fp8=True)


def quantised(matrix: torch.Tensor) -> torch.Tensor:
    """What a matrix is in float8_e4m3 with a power-of-two scale a row, by its definition."""
    scale = 2.0 ** torch.floor(torch.log2(448.0 / matrix.abs().amax(dim=-1, keepdim=True).double()))
    return (matrix.double() * scale).to(torch.float8_e4m3fn).double() / scale


def test_float8_products_are_those_of_rows_rounded_to_e4m3() -> None:
    torch.manual_seed(3)
    states = torch.randn(32, 64).mul_(torch.logspace(-3, 3, 32)[:, None]).bfloat16().requires_grad_()
    weight = torch.randn(48, 64).bfloat16().requires_grad_()
    pull = torch.randn(32, 48).bfloat16()
    product = ttt._fp8_linear()(states, weight)
    product.backward(pull)
    assert states.grad is not None
    assert weight.grad is not None
    expected = quantised(states.detach()) @ quantised(weight.detach()).T
    pulled = quantised(pull) @ quantised(weight.detach().T.contiguous()).T
    weighed = quantised(pull.T.contiguous()) @ quantised(states.detach().T.contiguous()).T
    for found, wanted in ((product, expected), (states.grad, pulled), (weight.grad, weighed)):
        assert (found.double() - wanted).norm() / wanted.norm() < 3e-3  # bfloat16's rounding of the result
    exact = states.detach().double() @ weight.detach().double().T
    assert 0.01 < (product.double() - exact).norm() / exact.norm() < 0.06  # and it is float8 that was multiplied


def test_float8_trains_on_the_same_loss() -> None:
    model, batch = make(), packed()
    loss, *_ = outcome(model, batch)
    ttt.install(model, fp8=True)
    assert outcome(model, batch)[0] == pytest.approx(loss, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": []}, "fp8_linears needs a GPU, and devices is empty"),
        ({"distributed": "fsdp"}, "fp8_linears is for distributed ddp, and distributed is fsdp"),
        ({"sequence_length": 1000}, "fp8_linears needs a sequence_length that 16 divides, and it is 1000"),
        ({"compute_dtype": "float32"}, "needs compute_dtype bfloat16 or float16 for the rest, and it is float32"),
    ],
)
def test_float8_where_it_cannot_be_is_refused_with_the_configuration(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DrafterConfig.model_validate({"fp8_linears": True, "devices": [0], **changes})


@pytest.mark.parametrize("devices", [[0, 0], [-1]])
def test_devices_are_gpus_each_once(devices: list[int]) -> None:
    with pytest.raises(ValidationError, match="devices must be different GPU indices from 0 up"):
        DrafterConfig(devices=devices)


def test_a_gpu_without_float8_is_refused_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(InputError, match=r"compute capability 8\.9, this GPU has 8\.0"):
        compute.prepare(make(), DrafterConfig(fp8_linears=True, devices=[0]))


@pytest.mark.parametrize(
    ("changes", "fast"),
    [({}, True), ({"devices": []}, False), ({"distributed": "fsdp"}, False), ({"compute_dtype": "float32"}, False)],
)
def test_who_gets_the_fast_pass(changes: dict[str, Any], fast: bool) -> None:
    model = make()
    compute.prepare(model, DrafterConfig.model_validate({"devices": [0], **changes}))
    assert hasattr(model, "ttt") == fast
