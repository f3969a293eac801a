"""Shares of a mixture."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.traces.mixture import mixture

SOURCES = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 50)), min_size=1, max_size=6)
LIMIT = st.none() | st.integers(3, 2000)


@pytest.mark.parametrize(
    ("available", "weights", "limit", "expected"),
    [
        ([45, 30], [3, 1], None, [45, 15]),
        ([100, 30], [3, 1], None, [90, 30]),
        ([10, 90], [0.1, 0.9], None, [10, 90]),
        ([50, 50, 50], [0.5, 0.3, 0.2], None, [50, 30, 20]),
        ([100, 100, 100], [1, 1, 1], 100, [34, 33, 33]),
        ([100, 100], [1, 2], 100, [33, 67]),
        ([7], [0.25], None, [7]),
        ([7], [2.0], 3, [3]),
        ([5, 0], [1, 1], None, [0, 0]),
        ([5, 0, 3], [None, None, None], None, [5, 0, 3]),
        ([50, 30, 20], [None, None, None], 10, [5, 3, 2]),
        ([0, 0], [None, None], None, [0, 0]),
    ],
)
def test_by_hand(available: list[int], weights: list[float | None], limit: int | None, expected: list[int]) -> None:
    assert mixture(available, weights, limit) == expected


@given(SOURCES, LIMIT)
def test_proportions_within_what_is_there(sources: list[tuple[int, int]], limit: int | None) -> None:
    available, weights = [n for n, _ in sources], [w for _, w in sources]
    shares = mixture(available, weights, limit)
    total, whole = sum(shares), sum(weights)
    assert all(0 <= share <= n for share, n in zip(shares, available, strict=True))
    assert limit is None or total <= limit
    assert all(abs(share - Fraction(total * w, whole)) < 1 for share, w in zip(shares, weights, strict=True))
    one_more = [Fraction((total + 1) * w, whole) for w in weights]
    assert total == limit or any(wanted > n for wanted, n in zip(one_more, available, strict=True))


@given(SOURCES, LIMIT, st.integers(2, 9))
def test_weights_are_relative(sources: list[tuple[int, int]], limit: int | None, factor: int) -> None:
    available, weights = [n for n, _ in sources], [w for _, w in sources]
    assert mixture(available, [w * factor for w in weights], limit) == mixture(available, weights, limit)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6), LIMIT)
def test_without_weights_everything_up_to_the_limit(available: list[int], limit: int | None) -> None:
    shares = mixture(available, [None] * len(available), limit)
    assert all(0 <= share <= n for share, n in zip(shares, available, strict=True))
    assert sum(shares) == min(sum(available), limit or sum(available))
