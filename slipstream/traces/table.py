"""`traces.parquet`: one row a trace, training rows first, then validation, each in order of prompt key and turn.

So its bytes do not depend on the order in which answers arrived.

| column | |
|---|---|
| key, split, kind | string: the prompt's |
| turn | int32: which of the verifier's turns in the prompt's conversation, from 0 |
| input_ids | list<int32>: everything before the turn and the turn, as the server gave them |
| loss_mask | list<int8>: 1 on the tokens of this turn, unshifted |
| prompt_tokens | int32: how many of input_ids come before the turn |
| think_end | int32: index in input_ids of `</think>`, -1 when the thinking was cut or there is none |
| finish_reason, thinking, answer | string |
| tool_calls, sampling | string: JSON, what the turn calls (null for none) and what was asked for |
| ids | string: `server` for the server's own token ids, `rebuilt` for text rendered again, `imported` |

Row groups of about GROUP_TOKENS tokens: a reader of single columns skips, a reader of rows keeps a few MB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream import atomic
from slipstream.artifact import Artifact
from slipstream.traces.prompts import Prompt
from slipstream.traces.trace import Trace

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

FILE = "traces.parquet"
SCHEMA_VERSION = "2"
GROUP_TOKENS = 1 << 19
GROUP_ROWS = 4096


def schema() -> pa.Schema:
    """The columns above."""
    import pyarrow as pa

    fields = [("key", pa.string()), ("split", pa.string()), ("kind", pa.string()), ("turn", pa.int32())]
    fields += [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))]
    fields += [("prompt_tokens", pa.int32()), ("think_end", pa.int32())]
    texts = ("finish_reason", "thinking", "answer", "tool_calls", "sampling", "ids")
    fields += [(name, pa.string()) for name in texts]
    return pa.schema(fields, metadata={"slipstream_schema": SCHEMA_VERSION})


class Writer:
    """Writes rows as they come, one row group in memory; made by `writing`."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._schema = schema()
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def add(self, split: str, prompt: Prompt, trace: Trace, boundary: int | None) -> None:
        """Appends a row; `boundary` is the index of `</think>` in the output, None without."""
        import numpy as np

        prompt_tokens, output_tokens = len(trace.prompt_ids), len(trace.output_ids)
        mask = np.repeat(np.array([0, 1], dtype=np.int8), [prompt_tokens, output_tokens])
        self.add_masked(split, prompt.kind, trace, boundary, mask)

    def add_masked(self, split: str, kind: str, trace: Trace, boundary: int | None, loss_mask: np.ndarray) -> None:
        """The same for a row whose mask is its own: int8, as long as prompt and output."""
        import numpy as np

        prompt_tokens = len(trace.prompt_ids)
        self._rows.append(
            {
                "key": trace.key,
                "split": split,
                "kind": kind,
                "turn": trace.turn,
                "input_ids": np.array(trace.prompt_ids + trace.output_ids, dtype=np.int32),
                "loss_mask": loss_mask,
                "prompt_tokens": prompt_tokens,
                "think_end": -1 if boundary is None else prompt_tokens + boundary,
                "finish_reason": trace.finish_reason,
                "thinking": _encodable(trace.thinking),
                "answer": _encodable(trace.answer),
                "tool_calls": json.dumps(trace.tool_calls) if trace.tool_calls else None,
                "sampling": json.dumps(trace.sampling, sort_keys=True),
                "ids": trace.ids,
            }
        )
        self._tokens += len(loss_mask)
        if self._tokens >= GROUP_TOKENS or len(self._rows) >= GROUP_ROWS:
            self.flush()

    def flush(self) -> None:
        """Ends the row group."""
        import pyarrow as pa

        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, self._schema))
        self._rows, self._tokens = [], 0


@contextmanager
def writing(folder: Path) -> Iterator[Writer]:
    """A writer of `folder`/traces.parquet, which appears whole when the block ends."""
    import pyarrow.parquet as pq

    with (
        atomic.replacing(folder / FILE) as temporary,
        pq.ParquetWriter(temporary, schema(), compression="zstd") as parquet,
    ):
        writer = Writer(parquet)
        yield writer
        writer.flush()


def read(
    artifact: Artifact, columns: Sequence[str], start: int = 0, stop: int | None = None
) -> Iterator[dict[str, Any]]:
    """Rows `start` … `stop - 1` of the artifact in order, only `columns` of them; other row groups are not read."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(artifact.folder / FILE)
    last = file.metadata.num_rows if stop is None else stop
    groups, first, offset = [], 0, 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if offset + rows <= start:
            first = offset + rows
        elif offset < last:
            groups.append(group)
        offset += rows
    number = first
    for batch in file.iter_batches(64, row_groups=groups, columns=list(columns)):
        low, high = max(start - number, 0), min(last - number, len(batch))
        number += len(batch)
        if low < high:
            yield from batch.slice(low, high - low).to_pylist()


def lengths(artifact: Artifact) -> list[int]:
    """The number of tokens of every row."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    found: list[int] = []
    for batch in pq.ParquetFile(artifact.folder / FILE).iter_batches(1024, columns=["input_ids"]):
        found += pc.list_value_length(batch["input_ids"]).to_pylist()
    return found


def _encodable(text: str | None) -> str | None:
    """`text` with what UTF-8 cannot hold (half of a surrogate pair) replaced; training reads the ids, not this."""
    return None if text is None else text.encode("utf-8", "replace").decode()
