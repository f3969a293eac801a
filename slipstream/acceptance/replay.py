"""Acceptance of a drafter without a server: its own tokens fed back, on captured states.

`replay` drafts behind every token of a trace (`replay_chains`), then walks the trace as a server does
(`replay_walk`).  The verifier's part is the trace itself.  That is exact for greedy traces, and without bias for
sampled ones: a greedy draft d passes rejection sampling with probability p(d), which is the probability that the
sampled token of the trace is d.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.acceptance.replay_chains import draft_chains, gathered, target_ids
from slipstream.acceptance.replay_walk import accepted_runs, spans, walk


@dataclass(frozen=True)
class Replay:
    """Counts of a replay; those of several batches or ranks add up.

    `drafts` made by the walk, `accepted` among them at each position.  Of the `supervised` tokens that a first draft
    can stand for, visited by the walk or not: `covered` are in the draft vocabulary, `right` were drafted right, so a
    token that the drafter cannot say is a miss (speculators' accuracies compare inside the draft vocabulary only).
    """

    drafts: int
    accepted: tuple[int, ...]
    supervised: int = 0
    covered: int = 0
    right: int = 0

    def __add__(self, other: Replay) -> Replay:
        return Replay(
            self.drafts + other.drafts,
            tuple(mine + its for mine, its in zip(self.accepted, other.accepted, strict=True)),
            self.supervised + other.supervised,
            self.covered + other.covered,
            self.right + other.right,
        )

    @property
    def rates(self) -> list[float]:
        """For each position the share of drafts in which it was accepted."""
        return [count / self.drafts if self.drafts else 0.0 for count in self.accepted]

    @property
    def accepted_length(self) -> float:
        """Tokens that a verification step yields, the verifier's own included."""
        return 1 + sum(self.rates)

    @property
    def coverage(self) -> float:
        """Share of the supervised tokens that the draft vocabulary holds."""
        return self.covered / self.supervised if self.supervised else 0.0

    @property
    def accuracy(self) -> float:
        """Share of all supervised tokens that the first draft gets right."""
        return self.right / self.supervised if self.supervised else 0.0


def first_drafts(
    drafted: torch.Tensor, targets: torch.Tensor, supervised: torch.Tensor, t2d: torch.Tensor | None
) -> tuple[int, int, int]:
    """Supervised targets, those in the draft vocabulary (`t2d` bool [verifier vocabulary]), those drafted right.

    All of one shape; ids are the verifier's.
    """
    wanted = targets[supervised]
    covered = wanted.numel() if t2d is None else int(t2d[wanted].sum())
    return wanted.numel(), covered, int((drafted[supervised] == wanted).sum())


def replay(model: Any, batches: Iterable[Mapping[str, Any]], tokens: int) -> Replay:
    """Replays packed batches of speculators' loaders with chains of `tokens` tokens.

    `model` is an `Eagle3DraftModel` (wrapped or sharded as training has it); under FSDP every rank must bring the same
    number of batches.  States are taken in the autocast of the caller.
    """
    total = Replay(0, (0,) * tokens)
    with torch.no_grad(), gathered(model) as drafter:
        for batch in batches:
            total += _replay_batch(drafter, batch, tokens)
    return total


def _replay_batch(model: Any, batch: Mapping[str, Any], tokens: int) -> Replay:
    device = model.lm_head.weight.device
    states, ids, documents, positions, mask, last = (
        batch[name].to(device)
        for name in (
            "hidden_states",
            "input_ids",
            "document_ids",
            "position_ids",
            "loss_mask",
            "verifier_last_hidden_states",
        )
    )
    chains = draft_chains(model, states, ids, documents, positions, tokens)
    span = spans(mask[0].bool(), documents[0])
    after = torch.full_like(ids[0], -1)
    ends = _ends(span)
    after[ends] = target_ids(model, model.verifier_lm_head(model.verifier_norm(last[0, ends])).argmax(dim=-1))
    runs = accepted_runs(chains, ids[0], span, after)
    counts = first_drafts(
        chains[:-1, 0], ids[0, 1:], (span[1:] != -1) & (span[1:] == span[:-1]), getattr(model, "t2d", None)
    )
    total = Replay(0, (0,) * tokens, *counts)
    lengths = torch.bincount(span[span != -1])
    for one in runs[span != -1].cpu().split(lengths.tolist()):
        drafts, accepted = walk(one.tolist(), tokens)
        total += Replay(drafts, tuple(accepted))
    return total


def _ends(span: torch.Tensor) -> torch.Tensor:
    """The last position of every span, int64 [spans]."""
    last = span != -1
    last[:-1] &= span[:-1] != span[1:]
    return last.nonzero()[:, 0]
