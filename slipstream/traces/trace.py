"""One trace: the verifier's answer to one prompt as token ids, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Trace:
    """What the server returned for one prompt.

    `prompt_ids` and `output_ids` are the server's own token ids, never re-tokenised text; `output_ids`
    includes `</think>` and the end token when the server generated them.  `thinking` and `answer` are
    its texts (None when it returned none).
    """

    key: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: str
    thinking: str | None
    answer: str | None

    @property
    def input_ids(self) -> list[int]:
        """Prompt and output, as the verifier saw them."""
        return [*self.prompt_ids, *self.output_ids]

    def loss_mask(self) -> list[int]:
        """1 on every token the verifier generated, 0 on the prompt; unshifted (speculators shifts it itself)."""
        return [0] * len(self.prompt_ids) + [1] * len(self.output_ids)

    def boundary(self, think_close: int | None) -> int | None:
        """Index in `output_ids` of the first `</think>`, None when the thinking was never closed."""
        if think_close is None or think_close not in self.output_ids:
            return None
        return self.output_ids.index(think_close)

    def to_json(self) -> str:
        """The record that the pool stores."""
        return json.dumps(asdict(self), ensure_ascii=True)

    @staticmethod
    def from_json(text: str) -> Trace:
        """The inverse of `to_json`."""
        row = json.loads(text)
        return Trace(**{**row, "prompt_ids": tuple(row["prompt_ids"]), "output_ids": tuple(row["output_ids"])})


def rejection(
    trace: Trace, think_close: int | None, reasoning: bool, keep_truncated: bool, eos_ids: Sequence[int]
) -> str | None:
    """Why a trace may not be trained on, or None.

    A trace cut by the token limit is kept as it is (an open thinking span, no end token) or rejected, by
    policy; it is never closed or ended artificially.
    """
    if not trace.output_ids:
        return "empty_output"
    truncated = trace.finish_reason == "length"
    if truncated and not keep_truncated:
        return "truncated"
    if reasoning and not truncated and trace.boundary(think_close) is None:
        return "no_reasoning"
    if truncated and trace.output_ids[-1] in eos_ids:
        return "end_token_after_cut"
    return None
