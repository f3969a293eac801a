"""What a traces artifact holds, counted while it is written: outcomes, lengths, domains, reasoning.

`summary.json` beside the rows; nothing after the stage reads it, so it is not part of `content`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from slipstream.traces.trace import Trace


def reason_class(reason: str) -> str:
    """The countable part of a reason: what stands before its details."""
    return reason.partition(":")[0]


def bucket(tokens: int) -> int:
    """The lower edge of a length's bin: exact below 16, then eight bins an octave."""
    step = 1 << max(0, tokens.bit_length() - 4)
    return tokens // step * step


@dataclass
class Tally:
    """The figures of one domain, or of all."""

    rows: int = 0
    conversations: int = 0
    rejected: int = 0
    truncated: int = 0
    with_thinking: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    thinking_tokens: int = 0

    def add(self, trace: Trace, thinking: int, first: bool) -> None:
        """Counts an accepted row with so many tokens of thinking; `first` of its conversation."""
        self.rows += 1
        self.conversations += first
        self.truncated += trace.truncated
        self.with_thinking += thinking > 0
        self.prompt_tokens += len(trace.prompt_ids)
        self.output_tokens += len(trace.output_ids)
        self.thinking_tokens += thinking

    def figures(self) -> dict[str, Any]:
        """By name, with the shares that people compare."""
        return {
            **self.__dict__,
            "mean_output_tokens": round(self.output_tokens / self.rows, 1) if self.rows else None,
            "reasoning_share": round(self.thinking_tokens / self.output_tokens, 4) if self.output_tokens else None,
        }


@dataclass
class Summary:
    """Grows row by row; memory does not depend on how many."""

    total: Tally = field(default_factory=Tally)
    domains: dict[str, Tally] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    ids: Counter[str] = field(default_factory=Counter)
    prompt_lengths: Counter[int] = field(default_factory=Counter)
    output_lengths: Counter[int] = field(default_factory=Counter)
    answered: int = 0
    cut: int = 0

    def answer(self, trace: Trace) -> None:
        """Counts a recorded turn, whatever becomes of it."""
        self.answered += 1
        self.cut += trace.truncated
        self.ids[trace.ids] += 1

    def accept(self, kind: str, trace: Trace, thinking: int, first: bool) -> None:
        """Counts a row that is written: tokens of thinking in it, and whether it is its conversation's first."""
        for tally in (self.total, self._domain(kind)):
            tally.add(trace, thinking, first)
        self.prompt_lengths[bucket(len(trace.prompt_ids))] += 1
        self.output_lengths[bucket(len(trace.output_ids))] += 1

    def reject(self, kind: str, reason: str) -> None:
        """Counts a turn, or a prompt without one, that is set aside."""
        for tally in (self.total, self._domain(kind)):
            tally.rejected += 1
        self.reasons[reason_class(reason)] += 1

    def _domain(self, kind: str) -> Tally:
        return self.domains.setdefault(kind, Tally())

    @property
    def truncated_share(self) -> float:
        """Answers cut by the token limit over all answers."""
        return self.cut / self.answered if self.answered else 0.0

    def mismatch_share(self) -> float:
        """Rebuilt rows that disagree with the server's counts over all rebuilt ones."""
        rebuilt = self.ids["rebuilt"] + self.ids["mismatched"]
        return self.ids["mismatched"] / rebuilt if rebuilt else 0.0

    def figures(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        return {
            "total": self.total.figures(),
            "domains": {name: tally.figures() for name, tally in sorted(self.domains.items())},
            "reasons": dict(sorted(self.reasons.items())),
            "answers": self.answered,
            "truncated_answers": self.cut,
            "truncated_share": round(self.truncated_share, 4),
            "token_ids": dict(sorted(self.ids.items())),
            "mismatch_share": round(self.mismatch_share(), 4),
            "prompt_lengths": {str(edge): count for edge, count in sorted(self.prompt_lengths.items())},
            "output_lengths": {str(edge): count for edge, count in sorted(self.output_lengths.items())},
        }
