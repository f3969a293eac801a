"""Row ranges that partition the rows and hold about equal tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import InputError
from slipstream.features.shards import split_rows


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 12))
def test_partition_with_equal_tokens_within_the_largest_row(tokens: list[int], shards: int) -> None:
    made = split_rows(tokens, shards)
    assert [shard.index for shard in made] == list(range(shards))
    assert [row for shard in made for row in range(shard.start, shard.stop)] == list(range(len(tokens)))
    for shard in made:
        assert abs(sum(tokens[shard.start : shard.stop]) - sum(tokens) / shards) <= max(tokens)


@pytest.mark.parametrize(("rows", "idle"), [(3, 5), (10, 0)])
def test_fewer_rows_than_workers(rows: int, idle: int) -> None:
    made = split_rows([7] * rows, 8)
    assert sorted(row for shard in made for row in range(shard.start, shard.stop)) == list(range(rows))
    assert sum(shard.start == shard.stop for shard in made) == idle


def test_no_rows_at_all_is_an_error() -> None:
    with pytest.raises(InputError, match="no rows"):
        split_rows([], 8)


def test_one_long_row_gets_a_shard_to_itself() -> None:
    made = split_rows([10, 10, 980, 10, 10, 10], 2)
    assert [(shard.start, shard.stop) for shard in made] == [(0, 3), (3, 6)]


def test_even_rows_fall_evenly() -> None:
    assert [(s.start, s.stop) for s in split_rows([5] * 12, 4)] == [(0, 3), (3, 6), (6, 9), (9, 12)]
