"""Attention of EAGLE-3's training-time test: true keys before a position, and that position's own drafted keys.

At step t the query of position p sees the keys of positions <= p of its document (step 0: the verifier's states) and,
of each further step 1 … t, the one key that its own chain left there (speculators.models.eagle3.attention, the diagonal
blocks).  The first part is ordinary causal attention over packed documents; the drafted keys are a handful of scalars a
head, merged by log-sum-exp.  A flash kernel's backward pass takes the merged output and log-sum-exp as they are: its
gradients are p * (dp - sum(dout * out)) with p = exp(score - lse), which then are those of the whole (as in ring
attention, Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Layout:
    """Documents packed into one sequence of T tokens: `ends` int32 [documents + 1] (0 … T), `longest` in tokens."""

    ends: torch.Tensor
    longest: int

    @staticmethod
    def of(document_ids: torch.Tensor, device: torch.device) -> Layout:
        """The layout of `document_ids` [T] on the CPU; a run of equal ids is a document, padding (-1) one of them."""
        cuts = (document_ids[1:] != document_ids[:-1]).nonzero()[:, 0] + 1
        ends = torch.cat([cuts.new_zeros(1), cuts, cuts.new_tensor([len(document_ids)])])
        return Layout(ends.to(device, torch.int32, non_blocking=True), int(ends.diff().max()))


def attend(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    layout: Layout,
    scale: float,
) -> torch.Tensor:
    """[T, heads, head_dim] from `query` of the same shape and [T, key heads, head_dim] of each step, step 0 first.

    On a GPU in bfloat16 or float16 by torch's flash kernel, elsewhere dense (T x T weights a head).
    """
    drafted = [tensor for pair in zip(keys[1:], values[1:], strict=True) for tensor in pair]
    output: torch.Tensor = _Attention.apply(query, keys[0], values[0], layout, scale, *drafted)
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: Layout,
        scale: float,
        *drafted: torch.Tensor,
    ) -> torch.Tensor:
        out, lse, kept = _causal(query, key, value, layout, scale)
        if drafted:
            out, lse = _on_gpu(_merge, query)(query, out, lse, scale, drafted[::2], drafted[1::2])
        ctx.save_for_backward(query, key, value, out, lse, *kept, *drafted)
        ctx.layout, ctx.scale, ctx.kept = layout, scale, len(kept)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        query, key, value, out, lse, *rest = ctx.saved_tensors
        kept, drafted = rest[: ctx.kept], rest[ctx.kept :]
        gradient = gradient.contiguous()
        d_query, d_key, d_value = _causal_backward(gradient, query, key, value, out, lse, kept, ctx.layout, ctx.scale)
        d_drafted: tuple[torch.Tensor, ...] = ()
        if drafted:
            d_query, d_drafted = _on_gpu(_merge_backward, query)(
                gradient, query, out, lse, ctx.scale, drafted[::2], drafted[1::2], d_query
            )
        return d_query, d_key, d_value, None, None, *d_drafted


_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {}


def _on_gpu(function: Callable[..., Any], tensor: torch.Tensor) -> Callable[..., Any]:
    """`function`, compiled once where `tensor` lies on a GPU: a chain of elementwise passes over [T, heads, dim]."""
    if not tensor.is_cuda:
        return function
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function)
    return _COMPILED[function]


def _flash(query: torch.Tensor) -> bool:
    """Whether torch's flash kernel takes this: on a GPU, in a 16-bit type."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _per_head(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values [T, key heads, dim] in float32 for each query head."""
    groups = heads // tensor.shape[1]
    return tensor.float().repeat_interleave(groups, dim=1) if groups > 1 else tensor.float()


def _per_key_head(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The sum over the query heads of each key head, in the type of `like`."""
    return tensor.view(len(tensor), like.shape[1], -1, tensor.shape[-1]).sum(2).to(like.dtype)


def _merge(
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, heads, dim] and log-sum-exp [heads, T] with one more key and value a position for each pair."""
    heads = query.shape[1]
    scores = [(query.float() * _per_head(key, heads)).sum(-1) * scale for key in keys]  # [T, heads]
    total = torch.logsumexp(torch.stack([lse.T, *scores]), dim=0)
    merged = out.float() * (lse.T - total).exp()[..., None]
    for score, value in zip(scores, values, strict=True):
        merged = merged + _per_head(value, heads) * (score - total).exp()[..., None]
    return merged.to(query.dtype), total.T.contiguous()


def _merge_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    d_query: torch.Tensor,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """`d_query` with the drafted keys' part added, and the gradients of each key and value in turn."""
    heads = query.shape[1]
    queries, out_gradient = query.float(), gradient.float()
    delta = (out_gradient * out.float()).sum(-1)
    total, found = d_query.float(), []
    for key, value in zip(keys, values, strict=True):
        wide = _per_head(key, heads)
        weight = ((queries * wide).sum(-1) * scale - lse.T).exp()
        d_score = weight * ((out_gradient * _per_head(value, heads)).sum(-1) - delta) * scale
        total = total + d_score[..., None] * wide
        found += [
            _per_key_head(d_score[..., None] * queries, key),
            _per_key_head(weight[..., None] * out_gradient, value),
        ]
    return total.to(query.dtype), tuple(found)


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scale: float
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Causal attention inside each document: output, float32 log-sum-exp [heads, T], what the backward pass needs."""
    if not _flash(query):
        weights, lse = _dense(query, key, layout, scale)
        return torch.einsum("hqk,khd->qhd", weights, _per_head(value, query.shape[1])).to(query.dtype), lse, []
    longest = layout.longest
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, layout.ends, layout.ends, longest, longest, 0.0, True, False, scale=scale
    )
    return out, lse, [state, unused]


def _causal_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: Sequence[torch.Tensor],
    layout: Layout,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, where `out` and `lse` may hold further keys than these."""
    if _flash(query):
        ends, longest = layout.ends, layout.longest
        d_query, d_key, d_value = torch.ops.aten._flash_attention_backward(
            gradient, query, key, value, out, lse, ends, ends, longest, longest, 0.0, True, *kept, scale=scale
        )
        return d_query, d_key, d_value
    heads = query.shape[1]
    weights, _ = _dense(query, key, layout, scale, lse)
    gradients, wide = gradient.float(), _per_head(value, heads)
    delta = (gradients * out.float()).sum(-1).T[..., None]
    d_scores = weights * (torch.einsum("qhd,khd->hqk", gradients, wide) - delta) * scale
    d_query = torch.einsum("hqk,khd->qhd", d_scores, _per_head(key, heads)).to(query.dtype)
    d_key = _per_key_head(torch.einsum("hqk,qhd->khd", d_scores, query.float()), key)
    d_value = _per_key_head(torch.einsum("hqk,qhd->khd", weights, gradients), value)
    return d_query, d_key, d_value


def _dense(
    query: torch.Tensor, key: torch.Tensor, layout: Layout, scale: float, lse: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [heads, T, T] over the true keys and the log-sum-exp that normalises them (their own without `lse`)."""
    length, heads = query.shape[:2]
    place = torch.arange(length, device=query.device)
    document = torch.bucketize(place, layout.ends[1:].long(), right=True)
    seen = (document[:, None] == document) & (place[:, None] >= place)
    scores = torch.einsum("qhd,khd->hqk", query.float(), _per_head(key, heads)) * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if lse is None else lse
    return (scores - lse[..., None]).exp(), lse
