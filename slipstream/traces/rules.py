"""Which traces may be trained on: the policy that the configuration states, applied to each row.

A trace cut by the token limit is kept as it is (an open thinking span, no end token) or rejected, by policy; it is
never closed or ended artificially.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream import verifier
from slipstream.config import RunConfig
from slipstream.traces.sampling import told_not_to_think
from slipstream.traces.trace import MISMATCHED, Trace

FINISHED = frozenset({"stop", "length", "tool_calls"})


@dataclass(frozen=True)
class Rules:
    """The policy and the token ids it speaks of; `think_open` and `think_close` are None for a verifier without."""

    think_open: int | None
    think_close: int | None
    eos_ids: tuple[int, ...]
    reasoning: bool = True
    keep_truncated: bool = True
    min_supervised_share: float = 0.0
    max_supervised_share: float = 1.0

    @staticmethod
    def of(config: RunConfig) -> Rules:
        """The rules of a run."""
        special = verifier.special_tokens(verifier.folder_of(config.verifier))
        return Rules(
            think_open=special.get(verifier.THINK_OPEN),
            think_close=special.get(verifier.THINK_CLOSE),
            eos_ids=verifier.load_shape(config.verifier).eos_token_ids,
            reasoning=config.traces.reasoning,
            keep_truncated=config.traces.keep_truncated,
            min_supervised_share=config.traces.min_supervised_share,
            max_supervised_share=config.traces.max_supervised_share,
        )

    def wants_thinking(self, trace: Trace) -> bool:
        """Whether this trace must have thought."""
        return self.reasoning and not told_not_to_think(trace.sampling)

    def thinking_tokens(self, trace: Trace) -> int:
        """Tokens of thinking in the output; all of it when it was cut inside the thinking."""
        boundary = trace.boundary(self.think_close)
        if boundary is None:
            return len(trace.output_ids) if trace.truncated and self.wants_thinking(trace) else 0
        return boundary

    def rejection(self, trace: Trace) -> str | None:
        """Why a trace may not be trained on (what stands before a colon is counted), or None."""
        boundary = trace.boundary(self.think_close)
        return self._incomplete(trace) or self._unreasoned(trace, boundary) or self._unbalanced(trace, boundary)

    def _incomplete(self, trace: Trace) -> str | None:
        if trace.ids == MISMATCHED:
            return "token_mismatch"
        if trace.finish_reason not in FINISHED:
            return f"unfinished: finish_reason {trace.finish_reason}"
        if not trace.output_ids:
            return "empty_output"
        if trace.truncated and not self.keep_truncated:
            return "truncated"
        return "end_token_after_cut" if trace.truncated and trace.output_ids[-1] in self.eos_ids else None

    def _unreasoned(self, trace: Trace, boundary: int | None) -> str | None:
        thought = boundary is not None and bool((trace.thinking or "").strip())
        if self.wants_thinking(trace) and not trace.truncated and not thought:
            return "no_reasoning"
        return "leaked_thinking" if self._leaks(trace, boundary) else None

    def _unbalanced(self, trace: Trace, boundary: int | None) -> str | None:
        if self._says_nothing(trace, boundary):
            return "empty_answer"
        balanced = self.min_supervised_share <= trace.supervised_share <= self.max_supervised_share
        return None if balanced else "supervised_share"

    def _leaks(self, trace: Trace, boundary: int | None) -> bool:
        """Whether the answer holds thinking: a second span, or tags that the server's parser left in its text."""
        after = 0 if boundary is None or told_not_to_think(trace.sampling) else boundary + 1
        open_span = boundary is None and trace.truncated and self.wants_thinking(trace)
        tail = () if open_span else trace.output_ids[after:]
        tags = {self.think_open, self.think_close} - {None}
        text = trace.answer or ""
        return any(token in tags for token in tail) or verifier.THINK_OPEN in text or verifier.THINK_CLOSE in text

    def _says_nothing(self, trace: Trace, boundary: int | None) -> bool:
        if trace.truncated or trace.tool_calls:
            return False
        tail = trace.output_ids if boundary is None else trace.output_ids[boundary + 1 :]
        return all(token in self.eos_ids for token in tail)
