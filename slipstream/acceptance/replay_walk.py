"""Which drafts a server would have made for a trace, and how far each was accepted.

A server that drafts k tokens looks only at the places where a verification step ended: it begins behind the token that
the prefill sampled, takes the longest right prefix of the draft and the verifier's own token after it, and drafts
again there.  Averages over all anchors would count places that lie inside an accepted run, where drafts are easier
than where a run broke off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def spans(supervised: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Numbers the runs of generated tokens: int64 [length], -1 where nothing was generated.

    `supervised` bool [length] and `documents` int64 [length] (-1: padding) are of one packed batch.  A run ends where
    the mask does or the document does, so a conversation has one for each of its answers.
    """
    inside = supervised & (documents != -1)
    first = inside.clone()
    first[1:] &= ~inside[:-1] | (documents[1:] != documents[:-1])
    return torch.where(inside, first.cumsum(0) - 1, -1)


def accepted_runs(chains: torch.Tensor, tokens: torch.Tensor, span: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """How many tokens of each anchor's chain are the trace's: int64 [length].

    `chains` int64 [length, k]: token j of anchor i stands for position i + 1 + j of `tokens` [length]; `span` is of
    `spans`.  Behind a span the trace says nothing more.  The verifier does: its state at the span's last token is
    captured, so the token that it would put next is known, `after[e]` int64 for the last position e (-1: unknown, and
    so is everything later).  What is unknown counts as rejected.
    """
    length, count = chains.shape
    places = torch.arange(length, device=chains.device)[:, None] + 1 + torch.arange(count, device=chains.device)
    known = places.clamp(max=length - 1)
    inside = (places < length) & (span[known] == span[:, None]) & (span[:, None] != -1)
    right = inside & (chains == tokens[known])
    previous = (places - 1).clamp(max=length - 1)
    ended = ~inside & (span[previous] == span[:, None]) & (places - 1 < length) & (span[:, None] != -1)
    right |= ended & (chains == after[previous])
    return right.long().cumprod(dim=1).sum(dim=1)


def walk(runs: Sequence[int], tokens: int) -> tuple[int, list[int]]:
    """The drafts of one generated span, and in how many each of the `tokens` positions was accepted.

    `runs[i]` is the accepted length of the draft behind the span's token i.  The first token is the prefill's; no
    draft follows the last one, because the request is over.
    Source: vllm.v1.core.sched.scheduler.update_from_output counts one draft for each step that had scheduled draft
    tokens, with all that the verifier took, also what lies behind the end of the answer.
    """
    drafts, accepted, place = 0, [0] * tokens, 0
    while place < len(runs) - 1:
        drafts += 1
        for position in range(runs[place]):
            accepted[position] += 1
        place += runs[place] + 1
    return drafts, accepted
