"""All chains at once against a loop that makes one chain after the other with arithmetic of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from speculators import SpeculatorsConfig
from speculators.config import VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from slipstream.acceptance.replay import replay
from slipstream.acceptance.replay_chains import draft_chains

HIDDEN, HEADS, GROUPS, HEAD, WORDS, DRAFT_WORDS, AUX, EPS, THETA = 12, 4, 2, 6, 40, 17, 3, 1e-5, 100.0
LENGTH, TOKENS = 26, 4
INPUTS = ("hidden_states", "input_ids", "document_ids", "position_ids")
DOCUMENTS = [11, 9]  # and six places of padding


def drafter(attention: str = "sdpa", **options: Any) -> Eagle3DraftModel:
    """A random drafter with every weight, norms included, far from one."""
    torch.manual_seed(3)
    layer = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attention_bias=False,
    )
    layer._attn_implementation = attention
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_WORDS,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **options,
    )
    model = Eagle3DraftModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    kept = torch.randperm(WORDS)[:DRAFT_WORDS].sort().values
    t2d = torch.zeros(WORDS, dtype=torch.bool)
    t2d[kept] = True
    model.load_vocab_mappings(t2d, kept - torch.arange(DRAFT_WORDS))
    return model


def packed(length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Two documents and padding, as speculators' collate function packs them."""
    torch.manual_seed(5)
    used = sum(DOCUMENTS)
    documents = torch.full((1, length), -1)
    documents[0, : DOCUMENTS[0]], documents[0, DOCUMENTS[0] : used] = 0, 1
    positions = torch.zeros(1, length, dtype=torch.long)
    positions[0, :used] = torch.cat([torch.arange(1, count + 1) for count in DOCUMENTS])
    batch = {
        "hidden_states": torch.randn(1, length, AUX * HIDDEN),
        "verifier_last_hidden_states": torch.randn(1, length, HIDDEN),
        "input_ids": torch.randint(WORDS, (1, length)),
        "loss_mask": torch.ones(1, length, dtype=torch.bool),
        "document_ids": documents,
        "position_ids": positions,
    }
    for name in ("hidden_states", "verifier_last_hidden_states", "input_ids", "loss_mask"):
        batch[name][0, used:] = 0
    return batch


def rms(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * value / (value.pow(2).mean() + EPS).sqrt()


def turned(value: torch.Tensor, place: int) -> torch.Tensor:
    """RoFormer's rotation, halves as pairs."""
    half = HEAD // 2
    angle = place * THETA ** (-2 * torch.arange(half) / HEAD)
    first, second = value[:half], value[half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


def one_chain(
    model: Eagle3DraftModel, states: torch.Tensor, ids: list[int], *, before: bool, normed_back: bool
) -> list[int]:
    """The chain behind the last of `states` [n, aux * hidden], whose next tokens are `ids`; nothing is cached."""
    w = {name: value.detach() for name, value in model.state_dict().items()}
    inputs = [w["fc.weight"] @ state for state in states]
    words = list(ids)
    chain: list[int] = []
    for _ in range(TOKENS):
        keys, values = [], []
        for place, (state, word) in enumerate(zip(inputs, words, strict=True)):
            normed = rms(state, w["layers.0.hidden_norm.weight"])
            both = torch.cat([rms(w["embed_tokens.weight"][word], w["layers.0.input_layernorm.weight"]), normed])
            key = (w["layers.0.self_attn.k_proj.weight"] @ both).view(GROUPS, HEAD)
            keys.append([turned(head, place) for head in key])
            values.append((w["layers.0.self_attn.v_proj.weight"] @ both).view(GROUPS, HEAD))
        query = (w["layers.0.self_attn.q_proj.weight"] @ both).view(HEADS, HEAD)
        mixed = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            asked = turned(query[head], place)
            share = torch.stack([asked @ key[group] for key in keys]).div(HEAD**0.5).softmax(0)
            mixed.append(sum(part * value[group] for part, value in zip(share, values, strict=True)))
        residual = normed if before else state
        out = residual + w["layers.0.self_attn.o_proj.weight"] @ torch.cat(mixed)
        inner = rms(out, w["layers.0.post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(w["layers.0.mlp.gate_proj.weight"] @ inner)
        out = out + w["layers.0.mlp.down_proj.weight"] @ (gate * (w["layers.0.mlp.up_proj.weight"] @ inner))
        final = rms(out, w["norm.weight"])
        best = int((w["lm_head.weight"] @ final).argmax())
        chain.append(best + int(w["d2t"][best]))
        inputs.append(final if normed_back else out)
        words.append(chain[-1])
    return chain


@pytest.mark.parametrize(("before", "normed_back"), [(False, False), (True, True)])
def test_every_chain_is_the_one_that_a_loop_makes(before: bool, normed_back: bool) -> None:
    model = drafter(norm_before_residual=before, norm_output=normed_back)
    batch = packed()
    with torch.no_grad():
        chains = draft_chains(model, *(batch[name] for name in INPUTS), TOKENS)
    start = 0
    for count in DOCUMENTS:
        for end in range(start + 1, start + count + 1):
            states, ids = batch["hidden_states"][0, start:end], batch["input_ids"][0, start:end].tolist()
            expected = one_chain(model, states, ids, before=before, normed_back=normed_back)
            assert chains[end - 1].tolist() == expected, (start, end)
        start += count


def test_flex_attention_makes_the_same_chains() -> None:
    """What training uses on a GPU; its masks come in blocks of 128."""
    batch, used = packed(128), sum(DOCUMENTS)
    with torch.no_grad():
        dense, flex = (
            draft_chains(drafter(attention), *(batch[name] for name in INPUTS), TOKENS)[:used]
            for attention in ("sdpa", "simple_flex_attention")
        )
    assert torch.equal(dense, flex)


def test_a_trace_of_the_drafters_own_words_is_accepted_whole_and_chance_is_not() -> None:
    """A document that continues as the drafter does: token by token the chain of its first place."""
    model, batch = drafter(), packed()
    by_chance = replay(model, [batch], TOKENS)
    with torch.no_grad():
        chains = draft_chains(model, *(batch[name] for name in INPUTS), TOKENS)
    batch["loss_mask"][:] = False
    batch["loss_mask"][0, 2 : 2 + TOKENS + 1] = True
    batch["input_ids"][0, 3 : 3 + TOKENS] = chains[2]
    told = replay(model, [batch, batch], TOKENS)
    assert (told.drafts, told.accepted, told.accepted_length) == (2, (2,) * TOKENS, 1 + TOKENS)
    assert told.covered == told.supervised == 2 * TOKENS
    assert by_chance.accepted_length < 1.5
    assert by_chance.supervised == sum(DOCUMENTS) - 2
    in_words = model.t2d[packed()["input_ids"][0]]
    assert by_chance.covered == int(
        in_words[1 : DOCUMENTS[0]].sum() + in_words[DOCUMENTS[0] + 1 : sum(DOCUMENTS)].sum()
    )


def test_a_batch_without_rows_counts_nothing() -> None:
    """What a rank replays that has none left while the others have."""
    batch = packed()
    batch["document_ids"][:] = -1
    assert replay(drafter(), [batch], TOKENS).drafts == 0
