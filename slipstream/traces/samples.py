"""A few traces for the eye: which rows, and their tokens as text with where supervision begins.

`samples.json` in the stage's folder is a list of

    {"key", "kind", "turn", "finish_reason", "segments": [{"kind": "prompt" | "thinking" | "answer", "text", "tokens"}]}

The prompt is not supervised; thinking (up to and including `</think>`) and answer are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from json import dumps
from pathlib import Path
from typing import Any

from slipstream.traces import splits
from slipstream.traces.rules import Rules
from slipstream.traces.trace import Trace

FILE = "samples.json"
MOST, FEW = 5, 3
CHARACTERS = 2000  # of a segment; the rest is cut out of its middle
Decode = Callable[[Sequence[int]], str]


class Chooser:
    """Keeps at most ten of the rows it is offered; what it chooses depends on their order alone.

    The first truncated row, the first of a later turn, the first training rows of different domains; first training
    rows make up for domains that there are not.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._truncated: dict[int, tuple[str, Trace]] = {}
        self._later: dict[int, tuple[str, Trace]] = {}
        self._first: dict[int, tuple[str, Trace]] = {}
        self._domains: dict[int, tuple[str, Trace]] = {}
        self._kinds: set[str] = set()

    def offer(self, split: str, kind: str, trace: Trace) -> None:
        """Looks at the next row."""
        row = {self._seen: (kind, trace)}
        self._seen += 1
        if trace.truncated and not self._truncated:
            self._truncated = row
        if trace.turn > 0 and not self._later:
            self._later = row
        if split == splits.TRAIN and len(self._first) < FEW:
            self._first |= row
        if split == splits.TRAIN and kind not in self._kinds and len(self._kinds) < MOST:
            self._kinds.add(kind)
            self._domains |= row

    def chosen(self) -> list[tuple[str, Trace]]:
        """Kind and trace of at most MOST rows, in row order."""
        rows = self._truncated | self._later
        for wanted, limit in ((self._domains, MOST), (self._first, FEW)):
            for index, row in wanted.items():
                if len(rows) < limit:
                    rows = rows | {index: row}
        return [rows[index] for index in sorted(rows)]


def rendered(rows: Sequence[tuple[str, Trace]], rules: Rules, folder: Path) -> list[dict[str, Any]]:
    """The content of `samples.json`; `folder` is the verifier's."""
    decode = decoder(folder)
    return [
        {
            "key": trace.key,
            "kind": kind,
            "turn": trace.turn,
            "finish_reason": trace.finish_reason,
            "segments": segments(trace, rules, decode),
        }
        for kind, trace in rows
    ]


def decoder(folder: Path) -> Decode | None:
    """Ids to text by the `tokenizer.json` in `folder`, None when there is none that loads.

    Special tokens stay visible.  An id without a token (a reserved one) becomes `<id>`: the library drops it.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # the library's own plain Exception; rows are whole without a sample
        return None

    def known(token: int) -> bool:
        return 0 <= token < 1 << 32 and tokenizer.id_to_token(token) is not None

    def decode(ids: Sequence[int]) -> str:
        parts = []
        for is_known, run in groupby(ids, known):
            tokens = list(run)
            text = tokenizer.decode(tokens, skip_special_tokens=False) if is_known else None
            parts.append("".join(f"<{token}>" for token in tokens) if text is None else text)
        return "".join(parts)

    return decode


def segments(trace: Trace, rules: Rules, decode: Decode | None) -> list[dict[str, Any]]:
    """The trace's non-empty parts in order; without `decode` in the server's own words, which leave out the prompt."""
    boundary = trace.boundary(rules.think_close)
    cut_while_thinking = rules.think_close is not None and trace.truncated and not trace.answer
    end = boundary + 1 if boundary is not None else len(trace.output_ids) if cut_while_thinking else 0
    ids = {"prompt": trace.prompt_ids, "thinking": trace.output_ids[:end], "answer": trace.output_ids[end:]}
    calls = dumps(trace.tool_calls) if trace.tool_calls else ""
    told = {
        "prompt": f"({len(trace.prompt_ids):,} tokens; there is no tokenizer.json to read them with)",
        "thinking": trace.thinking or "",
        "answer": (trace.answer or "") + calls,
    }
    return [
        {"kind": kind, "text": shortened(told[kind] if decode is None else decode(part)), "tokens": len(part)}
        for kind, part in ids.items()
        if part
    ]


def shortened(text: str) -> str:
    """`text` in UTF-8's reach, with what lies between its first and last 1,000 characters left out and counted."""
    text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair becomes "?"
    left_out = len(text) - CHARACTERS
    if left_out <= 0:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[… {left_out:,} characters left out …]\n{text[-half:]}"
