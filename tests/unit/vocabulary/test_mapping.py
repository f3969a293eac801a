"""The draft vocabulary and its two maps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import vocabulary
from slipstream.errors import Damaged, InputError

COUNTS = np.array([0, 0, 9, 0, 0, 3, 0, 0])  # {5: 3, 2: 9} of 8
T2D = np.array([True, True, True, False, False, True, False, False])
D2T = np.array([0, 0, 0, 2])


def test_unseen_tokens_fill_a_vocabulary_larger_than_what_is_said() -> None:
    """Field report 32: two tokens are said, four are wanted; the others follow by ascending id.  And 33: d2t holds
    offsets, t2d marks exactly as many tokens."""
    selected = vocabulary.choose(COUNTS, 4, [])
    assert selected.tolist() == [0, 1, 2, 5]
    t2d, d2t = vocabulary.mappings(selected, 8)
    assert (t2d.dtype, d2t.dtype) == (np.bool_, np.int64)
    assert d2t.tolist() == D2T.tolist()
    assert t2d.tolist() == T2D.tolist()
    vocabulary.check(t2d, d2t)


def test_absolute_ids_are_refused() -> None:
    """Field report 33: read as offsets they point past the vocabulary and disagree with t2d."""
    with pytest.raises(
        Damaged, match=r"d2t\[1\] is 1, which makes draft id 1 token 2 of 8, and t2d has token 1.*OFFSET"
    ):
        vocabulary.check(T2D, np.array([0, 1, 2, 5]))


@pytest.mark.parametrize(
    ("t2d", "d2t", "words"),
    [
        (T2D.astype(np.int8), D2T, "t2d must be bool"),
        (T2D[None], D2T, "t2d must be bool"),
        (T2D, D2T.astype(np.int32), "d2t must be int64"),
        (T2D, D2T[:3], "marks 4 tokens but d2t has 3"),
        (T2D, np.array([0, 0, 0, 1]), r"d2t\[3\] is 1, which makes draft id 3 token 4 of 8, and t2d has token 5 there"),
        (~T2D, D2T, "disagrees"),
    ],
)
def test_what_breaks_an_invariant_is_refused(t2d: np.ndarray, d2t: np.ndarray, words: str) -> None:
    with pytest.raises(Damaged, match=words):
        vocabulary.check(t2d, d2t)


def test_a_draft_larger_than_the_verifier_is_refused() -> None:
    """Field report 32."""
    with pytest.raises(InputError, match="10 draft tokens are more than the verifier's 8"):
        vocabulary.choose(COUNTS, 10, [])


@pytest.mark.parametrize("forced", [[8], [-1], [0, 99]])
def test_forced_ids_outside_the_verifier_are_refused(forced: list[int]) -> None:
    with pytest.raises(InputError, match="must_keep"):
        vocabulary.choose(COUNTS, 4, forced)


def test_more_forced_tokens_than_places_are_refused() -> None:
    with pytest.raises(InputError, match="2 is smaller than the 3 control tokens"):
        vocabulary.choose(COUNTS, 2, [1, 3, 4, 4])


def test_forced_tokens_displace_the_rarest() -> None:
    assert vocabulary.choose(COUNTS, 2, [7]).tolist() == [2, 7]
    assert vocabulary.choose(np.array([5, 5, 5, 5]), 2, []).tolist() == [0, 1]  # a tie goes to the lower id


def test_large_counts_keep_their_order() -> None:
    counts = np.array([2**60, 2**60 + 2**10, 1])
    assert vocabulary.choose(counts, 1, []).tolist() == [1]


def test_a_smaller_vocabulary_is_part_of_every_larger_one() -> None:
    counts = np.array([3, 0, 7, 7, 0, 1, 9, 0])
    taken = [{*vocabulary.choose(counts, size, [4]).tolist()} for size in range(1, 9)]
    assert taken[0] == {4}
    assert taken[3] == {4, 6, 2, 3}
    assert all(smaller < larger for smaller, larger in pairwise(taken))


@given(st.data())
def test_invariants(data: st.DataObject) -> None:
    counts = np.array(data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=60)))
    size = data.draw(st.integers(1, len(counts)))
    forced = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    selected = vocabulary.choose(counts, size, forced)
    t2d, d2t = vocabulary.mappings(selected, len(counts))
    assert (t2d.dtype, t2d.shape, int(t2d.sum())) == (np.bool_, (len(counts),), size)
    assert (d2t.dtype, d2t.shape) == (np.int64, (size,))
    assert [i + int(d2t[i]) for i in range(size)] == np.flatnonzero(t2d).tolist()
    assert all(t2d[token] for token in forced)
    free = [int(counts[token]) for token in np.flatnonzero(t2d) if token not in forced]
    left = [int(counts[token]) for token in np.flatnonzero(~t2d)]
    assert not free or not left or min(free) >= max(left)
    vocabulary.check(t2d, d2t)


@pytest.mark.parametrize(("name", "array"), [("t2d.npy", T2D), ("d2t.npy", D2T)])
def test_pickles_are_not_loaded(tmp_path: Path, name: str, array: np.ndarray) -> None:
    np.save(tmp_path / "t2d.npy", T2D)
    np.save(tmp_path / "d2t.npy", D2T)
    assert [value.tolist() for value in vocabulary.load(tmp_path)] == [T2D.tolist(), D2T.tolist()]
    np.save(tmp_path / name, array.astype(object), allow_pickle=True)
    with pytest.raises(ValueError, match="pickle"):
        vocabulary.load(tmp_path)
