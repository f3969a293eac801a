"""One trace: one turn of the verifier as token ids, and what follows from them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.encoding import encode

if TYPE_CHECKING:
    from slipstream.chat import Answer

SERVER, REBUILT, MISMATCHED, IMPORTED = "server", "rebuilt", "mismatched", "imported"


@dataclass(frozen=True)
class Trace:
    """What the server returned for one turn of one prompt's conversation.

    `prompt_ids` (everything before the turn, as the server rendered it) and `output_ids` are the server's own token
    ids; `output_ids` includes `</think>` and the end token when the server generated them.  `ids` says where they
    come from: SERVER, or REBUILT from text for a server that gives none, or MISMATCHED when what was rebuilt
    disagrees with the server's counts, or IMPORTED from a store.  `thinking` and `answer` are its texts (None when it
    returned none); `sampling` is what was asked for.
    """

    key: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: str
    thinking: str | None
    answer: str | None
    turn: int = 0
    tool_calls: tuple[dict[str, Any], ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    ids: str = SERVER

    @staticmethod
    def of(
        answer: Answer,
        key: str,
        turn: int,
        sampling: dict[str, Any],
        prompt_ids: tuple[int, ...],
        output_ids: tuple[int, ...],
        ids: str = SERVER,
    ) -> Trace:
        """A server's answer as the trace of one turn."""
        return Trace(
            key=key,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            finish_reason=answer.finish_reason,
            thinking=answer.thinking,
            answer=answer.answer,
            turn=turn,
            tool_calls=answer.tool_calls,
            sampling=sampling,
            ids=ids,
        )

    @property
    def input_ids(self) -> list[int]:
        """Prompt and output, as the verifier saw them."""
        return [*self.prompt_ids, *self.output_ids]

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut the answer."""
        return self.finish_reason == "length"

    @property
    def supervised_share(self) -> float:
        """Generated tokens over all tokens."""
        return len(self.output_ids) / max(1, len(self.prompt_ids) + len(self.output_ids))

    def loss_mask(self) -> list[int]:
        """1 on every token that this turn generated, 0 on all before; unshifted (speculators shifts it itself)."""
        return [0] * len(self.prompt_ids) + [1] * len(self.output_ids)

    def boundary(self, think_close: int | None) -> int | None:
        """Index in `output_ids` of the first `</think>`, None when the thinking was never closed."""
        if think_close is None or think_close not in self.output_ids:
            return None
        return self.output_ids.index(think_close)

    def to_record(self) -> tuple[bytes, bytes, str]:
        """What the pool stores: prompt ids and output ids as little-endian int32, the rest as JSON."""
        rest = {name: value for name, value in self.__dict__.items() if name not in ("prompt_ids", "output_ids")}
        return _packed(self.prompt_ids), _packed(self.output_ids), encode(rest).decode()

    @staticmethod
    def from_record(prompt_ids: bytes, output_ids: bytes, rest: str) -> Trace:
        """The inverse of `to_record`."""
        fields = json.loads(rest)
        fields["tool_calls"] = tuple(fields["tool_calls"])
        return Trace(prompt_ids=_unpacked(prompt_ids), output_ids=_unpacked(output_ids), **fields)


def _packed(ids: tuple[int, ...]) -> bytes:
    return np.array(ids, dtype="<i4").tobytes()


def _unpacked(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, dtype="<i4").tolist())
