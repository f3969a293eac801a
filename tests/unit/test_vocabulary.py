"""The draft vocabulary and its two maps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import artifact, vocabulary
from slipstream.config import RunConfig
from slipstream.errors import Damaged, InputError

COUNTS = np.array([0, 0, 9, 0, 0, 3, 0, 0])  # {5: 3, 2: 9} of 8
T2D = np.array([True, True, True, False, False, True, False, False])
D2T = np.array([0, 0, 0, 2])


def test_the_published_example() -> None:
    selected = vocabulary.choose(COUNTS, 4, [])
    assert selected.tolist() == [0, 1, 2, 5]
    t2d, d2t = vocabulary.mappings(selected, 8)
    assert (t2d.dtype, d2t.dtype) == (np.bool_, np.int64)
    assert d2t.tolist() == D2T.tolist()
    assert t2d.tolist() == T2D.tolist()
    vocabulary.check(t2d, d2t)


def test_absolute_ids_are_refused() -> None:
    with pytest.raises(Damaged, match="OFFSET"):
        vocabulary.check(T2D, np.array([0, 1, 2, 5]))


@pytest.mark.parametrize(
    ("t2d", "d2t", "words"),
    [
        (T2D.astype(np.int8), D2T, "t2d must be bool"),
        (T2D[None], D2T, "t2d must be bool"),
        (T2D, D2T.astype(np.int32), "d2t must be int64"),
        (T2D, D2T[:3], "marks 4 tokens but d2t has 3"),
        (T2D, np.array([0, 0, 0, 1]), "disagrees"),
        (~T2D, D2T, "disagrees"),
    ],
)
def test_what_breaks_an_invariant_is_refused(t2d: np.ndarray, d2t: np.ndarray, words: str) -> None:
    with pytest.raises(Damaged, match=words):
        vocabulary.check(t2d, d2t)


def test_a_draft_larger_than_the_verifier_is_refused() -> None:
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


def test_only_supervised_tokens_count_and_each_split_for_itself() -> None:
    rows = [
        {"split": "train", "input_ids": [1, 2, 3, 3], "loss_mask": [0, 0, 1, 1]},
        {"split": "train", "input_ids": [1, 4], "loss_mask": [0, 1]},
        {"split": "validation", "input_ids": [1, 0], "loss_mask": [1, 1]},
        {"split": "validation", "input_ids": [7], "loss_mask": [0]},
    ]
    counts = vocabulary.supervised_counts(rows, 8)
    assert counts["train"].tolist() == [0, 0, 0, 2, 1, 0, 0, 0]
    assert counts["validation"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_coverage_counts_tokens_outside_as_misses() -> None:
    inside = np.array([False, True])
    assert vocabulary.coverage(np.array([2, 2]), inside) == 0.5
    assert vocabulary.coverage(np.array([1, 3]), inside) == 0.75
    assert vocabulary.coverage(np.array([0, 0]), inside) == 0.0


def write_traces(workdir: Path, rows: list[dict[str, Any]]) -> artifact.Artifact:
    """A traces artifact that holds only what the vocabulary reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with artifact.claim(workdir, "traces", "t") as folder:
        pq.write_table(pa.Table.from_pylist(rows), folder.path / "traces.parquet")
        return folder.commit(version=1, recipe={}, inputs={}, content="traces", files=["traces.parquet"])


def test_the_stage(tmp_path: Path, make_config: Callable[..., RunConfig]) -> None:
    """Tokens 300 to 319 are said, 400 only in validation; control tokens of the pocket verifier are 488 to 507."""
    rows = [
        {"split": "train", "input_ids": [0, *range(300, 320)], "loss_mask": [0] + [1] * 20},
        {"split": "validation", "input_ids": [300, 300, 300, 400], "loss_mask": [1] * 4},
    ]
    traces = write_traces(tmp_path, rows)
    config = make_config(vocabulary={"size": 42, "must_keep": [450]})
    made = vocabulary.run(tmp_path, config, traces)
    t2d, d2t = vocabulary.load(made.folder)
    assert np.flatnonzero(t2d).tolist() == [0, *range(300, 320), 450, *range(488, 508)]
    assert np.array_equal(np.arange(42) + d2t, np.flatnonzero(t2d))
    counts = made.manifest().counts
    assert (counts["size"], counts["target_size"], counts["forced"]) == (42, 512, 21)
    assert counts["unseen"] == 22  # 0 is not supervised
    assert (counts["coverage_train"], counts["coverage_validation"]) == (1.0, 0.75)
    assert vocabulary.run(tmp_path, config, traces) == made
    assert vocabulary.key(config, traces) == made.key
    assert vocabulary.key(make_config(vocabulary={"size": 43, "must_keep": [450]}), traces) != made.key
