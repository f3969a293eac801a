"""Row ranges of about equal tokens: the unit that one task captures."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from slipstream.errors import InputError


class Shard(BaseModel):
    """Rows `start` … `stop - 1` of the traces; may be empty."""

    model_config = ConfigDict(frozen=True)
    index: int
    start: int
    stop: int


def split_rows(tokens: Sequence[int], shards: int) -> list[Shard]:
    """`shards` consecutive ranges that partition the rows, each holding about the same number of tokens.

    `tokens[i]` is the length of row i.  With fewer rows than shards some ranges are empty, which is fine.
    Raises InputError for no rows at all.
    """
    if not tokens:
        raise InputError("features: the traces have no rows, so there is nothing to capture")
    total = sum(tokens)
    edges, reached, row = [0], 0, 0
    for shard in range(1, shards):
        while row < len(tokens) and (reached + tokens[row] / 2) * shards <= total * shard:
            reached += tokens[row]
            row += 1
        edges.append(row)
    edges.append(len(tokens))
    return [Shard(index=i, start=edges[i], stop=edges[i + 1]) for i in range(shards)]
