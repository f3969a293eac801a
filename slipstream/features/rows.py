"""The rows whose states are wanted: the traces, in their order.

With `features.capture_while_generating` a row ends before the trace's last token: vLLM never feeds that token to the
verifier, so the pass that generates has no state for it.  The position that is lost would teach what follows
an end token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.digest import digest_tokens
from slipstream.features.shards import Shard, split_rows
from slipstream.traces import origin, table


@dataclass(frozen=True)
class Row:
    """One row: `number` in the traces, the trace's key and split, its token ids and how many are the prompt's."""

    number: int
    trace: str
    split: str
    prompt_tokens: int
    token_ids: list[int]

    @property
    def key(self) -> str:
        """The name of its states in the row pool."""
        return digest_tokens(self.token_ids)


def dropped_tokens(config: RunConfig) -> int:
    """Tokens at a trace's end that have no state."""
    return 1 if config.features.capture_while_generating else 0


def read_rows(config: RunConfig, traces: Artifact, start: int = 0, stop: int | None = None) -> Iterator[Row]:
    """Rows `start` … `stop - 1` of the traces."""
    columns = ["key", "split", "prompt_tokens", "input_ids"]
    end = -dropped_tokens(config) or None
    for number, row in enumerate(table.read(traces, columns, start, stop), start):
        yield Row(number, row["key"], row["split"], row["prompt_tokens"], row["input_ids"][:end])


def plan_shards(config: RunConfig, traces: Artifact) -> list[Shard]:
    """The row ranges to capture, none without a store.

    Raises InputError when the traces have no rows or are another verifier's.
    """
    origin.check(config, traces)
    if config.features.store == "none":
        return []
    lengths = table.lengths(traces)
    return split_rows([length - dropped_tokens(config) for length in lengths], config.features.shards)
