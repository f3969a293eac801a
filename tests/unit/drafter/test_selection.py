"""Which epoch is best, when training is over, and the rows that decide it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.drafter import selection
from slipstream.drafter.replay_rows import InOrder
from slipstream.errors import Damaged


@pytest.mark.parametrize(
    ("found", "best"),
    [
        ({0: 2.0, 1: 2.5, 2: 2.4}, 1),
        ({0: 2.0, 1: 2.5, 2: 2.5}, 1),  # of equals the earlier one: as good after less training
        ({10: 3.0, 9: 2.0}, 10),
        ({}, None),
    ],
)
def test_the_longest_accepted_length_is_best(found: dict[int, float], best: int | None) -> None:
    assert selection.best(found) == best


@pytest.mark.parametrize(
    ("found", "patience", "over"),
    [
        ([2.0, 2.5, 2.4], None, False),
        ([2.0, 2.5, 2.4], 1, True),
        ([2.0, 2.5, 2.4], 2, False),
        ([2.0, 2.5, 2.4, 2.5], 2, True),  # as long is not longer
        ([2.0, 2.5, 2.4, 2.6], 2, False),
        ([2.0, 2.1, 2.2, 2.3, 2.4], None, True),  # all five epochs
        ([], 1, False),
    ],
)
def test_training_is_over_after_all_epochs_or_when_patience_is(
    found: list[float], patience: int | None, over: bool
) -> None:
    assert selection.over(dict(enumerate(found)), 5, patience) == over


def test_a_checkpoint_without_a_replay_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    with pytest.raises(Damaged, match=r"replay\.json"):
        selection.figures(tmp_path, "0")
    (tmp_path / "0" / "replay.json").write_text(json.dumps({"accepted_length": 2.25}))
    assert selection.figures(tmp_path, "0") == {"accepted_length": 2.25}


@pytest.mark.parametrize(
    ("world", "batches"),
    [
        (1, [[[0, 1], [2], [3, 4]]]),
        (2, [[[0, 1], [3, 4]], [[2], []]]),  # as many batches on every rank: FSDP waits for all
        (4, [[[0, 1]], [[2]], [[3, 4]], [[]]]),
    ],
)
def test_every_rank_replays_its_share_of_the_same_batches(world: int, batches: list[list[list[int]]]) -> None:
    lengths = [40, 60, 150, 70, 30]
    assert [list(InOrder(lengths, 100, rank, world)) for rank in range(world)] == batches
    assert [len(InOrder(lengths, 100, rank, world)) for rank in range(world)] == [len(one) for one in batches]
