"""What the training process is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import RunConfig
from slipstream.drafter.job import Job
from slipstream.features.recipe import PRE_NORM


def job(config: RunConfig | None, train_rows: int, rows: int) -> Job:
    """A job of these rows."""
    fields = {"verifier": "v", "features": "f", "vocabulary": "w", "checkpoints": "c", "metrics": "m"}
    drafter = {"drafter": config.drafter, "shape": config.drafter.shape} if config else {}
    numbers = {"layer_ids": [1], "hidden_size": 8, "vocab_size": 9, "train_rows": train_rows, "rows": rows}
    numbers |= {"final_state": PRE_NORM}
    return Job.model_construct(**fields, **numbers, **drafter)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_the_ratio_cuts_after_the_training_rows(train: int, validation: int) -> None:
    """speculators takes the first int(rows * ratio) rows to train on and refuses a ratio outside (0, 1)."""
    ratio = job(None, train, train + validation).train_ratio
    assert 0 < ratio < 1
    assert int((train + validation) * ratio) == train


def test_the_file_comes_back(tmp_path: Path, make_config: Callable[..., RunConfig]) -> None:
    made = job(make_config(), 8, 10)
    (tmp_path / "job.json").write_text(made.model_dump_json())
    assert Job.load(tmp_path / "job.json") == made
