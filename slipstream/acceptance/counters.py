"""vLLM's speculative-decoding counters: two snapshots and their difference.

The counters on `/metrics` are cumulative, so warm-up and earlier runs are in them; a restart resets them.
Only differences mean anything: rate = d(accepted) / d(draft tokens), mean accepted length =
1 + d(accepted) / d(drafts) (the verifier's own token counts), summed over engines.
Source: vllm.v1.spec_decode.metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from slipstream.errors import ServerError

PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Counters:
    """Drafts made, tokens drafted, tokens accepted, and tokens accepted at each draft position (0-based)."""

    drafts: float = 0
    draft_tokens: float = 0
    accepted: float = 0
    per_position: Mapping[int, float] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the drafted tokens; None when nothing was drafted."""
        return self.accepted / self.draft_tokens if self.draft_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a verification step yields, the verifier's own included; None when nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def rate_per_position(self) -> list[float]:
        """For each draft position the share of drafts in which it was accepted."""
        if not self.drafts:
            return []
        return [self.per_position[i] / self.drafts for i in sorted(self.per_position)]

    def since(self, before: Counters) -> Counters:
        """What was counted after `before`; raises ServerError when a counter went back (the server restarted)."""
        totals = (
            (self.drafts, before.drafts),
            (self.draft_tokens, before.draft_tokens),
            (self.accepted, before.accepted),
        )
        if any(now < then for now, then in totals):
            raise ServerError("the server's counters went back during the measurement: it was restarted")
        positions = {i: value - before.per_position.get(i, 0) for i, value in self.per_position.items()}
        return Counters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted - before.accepted,
            positions,
        )


def parse(text: str) -> Counters:
    """The counters on a Prometheus page, summed over its engines."""
    totals = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
    positions: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            if not sample.name.endswith("_total"):
                continue
            name = sample.name.removeprefix(PREFIX).removesuffix("_total")
            if name in totals:
                totals[name] += sample.value
            elif name == "accepted_tokens_per_pos":
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0.0) + sample.value
    return Counters(totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], positions)
