"""When a training ends because of its figures, and that several ranks end it together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.drafter.guards import Guard, learns
from slipstream.errors import StageFailed


def rows(epoch: int, step: int) -> Sequence[int]:
    """Three rows a batch."""
    return range(100 * epoch + 3 * step, 100 * epoch + 3 * step + 3)


def feed(guard: Guard, losses: Sequence[float], norm: float = 1.0, first: int = 0) -> None:
    """Steps of epoch 2, which begins at step 50 of all."""
    for step, loss in enumerate(losses, first):
        guard.see(2, step, 50 + step, torch.tensor(loss), torch.tensor(norm))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_training_by_epoch_step_and_rows(value: float) -> None:
    guard = Guard(20.0, 1, "cpu", rows)
    with pytest.raises(
        StageFailed, match=rf"^epoch 2, step 54, rows 212, 213, 214 of the features: the loss is {value};"
    ) as e:
        feed(guard, [2.0, 2.0, 2.0, 2.0, value])
    assert "\n" not in str(e.value)


def test_so_does_a_gradient_that_is_none() -> None:
    with pytest.raises(StageFailed, match=r"step 50, rows .*: the norm of the gradient is inf"):
        feed(Guard(20.0, 1, "cpu", rows), [2.0], norm=math.inf)


def test_figures_are_looked_at_together_and_the_first_wrong_one_is_named() -> None:
    """Nothing waits for the device at a step; a checkpoint asks before it is written."""
    guard = Guard(20.0, 10, "cpu", rows)
    feed(guard, [2.0, math.nan, math.nan])
    with pytest.raises(StageFailed, match="step 51"):
        guard.check()
    guard.check()
    with pytest.raises(StageFailed, match="step 57"):
        feed(guard, [*[2.0] * 7, math.nan, 2.0, 2.0])


def test_a_loss_explodes_against_the_median_of_the_last_hundred() -> None:
    """Medians by hand: 120 steps of 10 then 100 of 1: 20 is over twenty times nothing that counts any more but 1."""
    before = [10.0] * 120 + [1.0] * 100
    feed(Guard(20.0, 7, "cpu", rows), [*before, 20.0, *[1.0] * 6])
    with pytest.raises(
        StageFailed, match=r"step 270, rows .*: the loss is 20.1 after a median of 1 over the last 100 steps, more"
    ):
        feed(Guard(20.0, 1, "cpu", rows), [*before, 20.1])
    feed(Guard(20.0, 1, "cpu", rows), [*[10.0] * 120, *[1.0] * 40, 150.0])  # the median is 10 still


def test_the_first_steps_and_a_tiny_loss_may_jump() -> None:
    feed(Guard(20.0, 1, "cpu", rows), [*[0.5] * 19, 100.0])
    with pytest.raises(StageFailed):
        feed(Guard(20.0, 1, "cpu", rows), [*[0.5] * 20, 100.0])
    feed(Guard(20.0, 1, "cpu", rows), [*[0.001] * 50, 0.9])


def test_a_mask_without_a_token_teaches_nothing() -> None:
    mask = torch.zeros(1, 8, dtype=torch.int64)
    assert not learns(mask, mask)
    mask[0, 5] = 1
    assert learns(mask, mask)


def _rank(rank: int, folder: str, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/join", rank=rank, world_size=2)
    some, none = torch.ones(1, 4), torch.zeros(1, 4)
    found: list[Any] = [learns(mask, mask) for mask in ((none, some)[rank], (some, none)[rank], none, some)]
    for losses in (([2.0, math.nan], [2.0, 2.0]), ([2.0, 2.0], [2.0, math.inf])):
        try:
            feed(Guard(20.0, 2, "cpu", lambda epoch, step: [rank]), losses[rank])
            found.append(None)
        except StageFailed as error:
            found.append(str(error))
    dist.destroy_process_group()
    answers.put((rank, found))


def test_all_ranks_decide_alike(tmp_path: Path) -> None:
    """A step counts when either has a supervised token; a loss of either ends both, in the same words."""
    context = get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, str(tmp_path), answers)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
    assert found[0] == found[1]
    assert found[0][:4] == [True, True, False, True]
    assert found[0][4].startswith("epoch 2, step 51, rows 0, 1 of the features: the loss is nan")
    assert found[0][5].startswith("epoch 2, step 51, rows 0, 1 of the features: the loss is inf")
