"""Draft chains of every position of a packed batch at once, from captured states, as vLLM drafts them.

At anchor p the first draft takes the verifier's auxiliary states of p through `fc` and the token p + 1; every further
one takes the drafter's own last state (behind the final norm with `norm_output`, before it without) and its own token,
and sees the keys of the true states up to p and the chain's own.  That is the attention of speculators' training-time
test (models.eagle3.core, Eagle3DraftModel.forward: a causal block and one diagonal a step) with the drafter's tokens
where training puts the trace's.
Sources: vllm.v1.spec_decode.llm_base_proposer (propose, set_inputs_first_pass) and
vllm.model_executor.models.llama_eagle3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from speculators.models.eagle3.attention import extend_dense_mask_for_draft_tokens, extend_mask_for_draft_tokens
from speculators.models.utils import conditional_torch_compile
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache


def target_ids(model: Any, draft_ids: torch.Tensor) -> torch.Tensor:
    """The verifier's ids of draft ids (d2t holds offsets; a drafter of the whole vocabulary has none)."""
    return draft_ids if model.d2t is None else draft_ids + model.d2t[draft_ids]


@contextmanager
def gathered(model: Any) -> Iterator[Any]:
    """The drafter inside a DDP wrapper, or with its own sharded parameters whole (its layers see to theirs)."""
    model = getattr(model, "module", model)
    if not isinstance(model, FSDPModule):
        yield model
        return
    model.unshard()
    try:
        yield model
    finally:
        model.reshard()


def _extended(model: Any, mask: Any, length: int) -> Any:
    if mask is None:
        return None
    if model._attn_impl == "simple_flex_attention":
        return extend_mask_for_draft_tokens(mask)
    return extend_dense_mask_for_draft_tokens(mask, length)


@conditional_torch_compile
def draft_chains(
    model: Any,
    hidden_states: torch.Tensor,
    input_ids: torch.Tensor,
    document_ids: torch.Tensor,
    position_ids: torch.Tensor,
    tokens: int,
) -> torch.Tensor:
    """Drafts `tokens` tokens behind every position: verifier ids, int64 [length, tokens].

    Takes what speculators' loaders give, on the model's device: `hidden_states` [1, length, aux * hidden] of position p
    beside the token of p + 1 in `input_ids` [1, length]; `document_ids` [1, length], -1 for padding, whose chains mean
    nothing.
    """
    length = input_ids.shape[1]
    documents = document_ids.squeeze(0)
    full = model._build_attn_mask(documents, length, input_ids.device) if model.uses_full_attn else None
    sliding = (
        model._build_attn_mask(documents, length, input_ids.device, model.sliding_window)
        if model.uses_sliding_window_attn
        else None
    )
    cache = DynamicCache()
    if model.input_norm is not None:
        hidden_states = model.input_norm(hidden_states)
    if model.fc_norm is not None:
        parts = hidden_states.chunk(len(model.fc_norm), dim=-1)
        hidden_states = torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], dim=-1)
    states = model.fc(hidden_states)
    chain = []
    for step in range(tokens):
        states = torch.cat([model.embed_tokens(input_ids), states], dim=-1)
        rotary = model.rotary_emb(states, position_ids)
        for index, layer in enumerate(model.layers):
            states = layer(
                states,
                attention_mask=sliding if index in model.sliding_window_indices else full,
                position_ids=position_ids,
                past_key_values=cache,
                cache_position=torch.arange(step * length, (step + 1) * length, device=input_ids.device),
                position_embeddings=rotary,
            )
        normed = model.norm(states)
        input_ids = target_ids(model, model.lm_head(normed).argmax(dim=-1))
        chain.append(input_ids[0])
        states = normed if model.config.norm_output else states
        full, sliding = _extended(model, full, length), _extended(model, sliding, length)
        position_ids = position_ids + 1
    return torch.stack(chain, dim=1)
