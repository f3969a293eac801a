"""The walk over a trace, on sequences made by hand."""

from __future__ import annotations

import pytest
import torch

from slipstream.acceptance.replay import Replay, first_drafts
from slipstream.acceptance.replay_walk import accepted_runs, spans, walk


@pytest.mark.parametrize(
    ("runs", "drafts", "accepted"),
    [
        # behind token 0: two accepted and one of the verifier's own, so the next draft stands behind token 3
        ([2, 9, 9, 0, 1, 9], 3, [2, 1, 0]),
        ([0, 0, 0, 0], 3, [0, 0, 0]),  # no draft behind the last token
        ([3, 9, 9, 9], 1, [1, 1, 1]),  # the answer is over with the draft
        ([1, 9, 2, 9], 2, [2, 1, 0]),  # the last draft reaches behind the end
        ([0], 0, [0, 0, 0]),  # the prefill's token ends the answer: nothing is drafted
        ([], 0, [0, 0, 0]),
    ],
)
def test_only_places_where_a_step_ended_are_visited(runs: list[int], drafts: int, accepted: list[int]) -> None:
    assert walk([min(run, 3) for run in runs], 3) == (drafts, accepted)


def test_a_span_ends_with_its_mask_and_with_its_document() -> None:
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    documents = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, -1, -1])
    assert spans(mask, documents).tolist() == [-1, 0, 0, -1, 1, 1, 2, -1, 3, -1, -1]


def test_a_chain_is_right_as_long_as_it_says_what_the_trace_says() -> None:
    """Two spans side by side: the second one's tokens are never the first one's targets."""
    tokens = torch.tensor([5, 6, 7, 8, 5, 6])
    span = torch.tensor([-1, 0, 0, 0, 1, 1])
    unknown = torch.full((6,), -1)
    chains = torch.tensor([[6, 7, 8], [7, 8, 5], [9, 8, 5], [5, 6, 7], [6, 1, 1], [1, 1, 1]])
    assert accepted_runs(chains, tokens, span, unknown).tolist() == [0, 2, 0, 0, 1, 0]


def test_behind_the_end_one_token_is_known_and_the_rest_is_not() -> None:
    tokens = torch.tensor([5, 6, 7, 0])
    span = torch.tensor([0, 0, 0, -1])
    after = torch.tensor([-1, -1, 4, -1])  # behind the 7 the verifier would say 4
    chains = torch.tensor([[6, 7, 4], [7, 4, 9], [4, 9, 9], [9, 9, 9]])
    assert accepted_runs(chains, tokens, span, after).tolist() == [3, 2, 1, 0]
    chains[0, 2] = chains[1, 1] = 3
    assert accepted_runs(chains, tokens, span, after).tolist() == [2, 1, 1, 0]


def test_the_last_place_of_a_full_batch_may_end_a_span() -> None:
    tokens, span, after = torch.tensor([5, 6]), torch.tensor([0, 0]), torch.tensor([-1, 3])
    assert accepted_runs(torch.tensor([[6, 3, 3], [3, 3, 3]]), tokens, span, after).tolist() == [2, 1]


def test_counts_add_up_over_batches_and_ranks() -> None:
    total = Replay(10, (6, 3, 1), 30, 28, 20) + Replay(30, (14, 7, 1), 50, 44, 40)
    assert total == Replay(40, (20, 10, 2), 80, 72, 60)
    assert total.rates == [0.5, 0.25, 0.05]
    assert total.accepted_length == pytest.approx(1.8)
    assert (total.coverage, total.accuracy) == (0.9, 0.75)


def test_without_a_draft_the_length_is_one() -> None:
    assert Replay(0, (0, 0)).accepted_length == 1
    assert Replay(0, (0, 0)).rates == [0, 0]


def test_a_target_outside_the_draft_vocabulary_is_a_miss() -> None:
    """Field report 37: targets 1, 9, 1, 9 with a draft vocabulary of {1}, right on every 1: half, not all."""
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[1] = True
    targets, drafted = torch.tensor([1, 9, 1, 9]), torch.tensor([1, 1, 1, 1])
    supervised, covered, right = first_drafts(drafted, targets, torch.ones(4, dtype=torch.bool), t2d)
    replayed = Replay(0, (0,), supervised, covered, right)
    assert (replayed.coverage, replayed.accuracy) == (0.5, 0.5)


def test_only_supervised_targets_count() -> None:
    targets, drafted = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 0])
    assert first_drafts(drafted, targets, torch.tensor([True, False, True, False]), None) == (2, 2, 1)
