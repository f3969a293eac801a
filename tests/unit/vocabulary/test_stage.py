"""The vocabulary's folder: maps, coverage on both splits, a page; other sizes leave the maps as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipstream import artifact, vocabulary
from slipstream.config import RunConfig
from slipstream.vocabulary import coverage, report

Make = Callable[..., RunConfig]
CONTROL = range(488, 508)  # the pocket tokenizer's


def test_only_supervised_tokens_count_and_each_split_for_itself() -> None:
    rows = [
        {"split": "train", "input_ids": [1, 2, 3, 3], "loss_mask": [0, 0, 1, 1]},
        {"split": "train", "input_ids": [1, 4], "loss_mask": [0, 1]},
        {"split": "validation", "input_ids": [1, 0], "loss_mask": [1, 1]},
        {"split": "validation", "input_ids": [7], "loss_mask": [0]},
    ]
    counts = coverage.supervised_counts(rows, 8)
    assert counts["train"].tolist() == [0, 0, 0, 2, 1, 0, 0, 0]
    assert counts["validation"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_coverage_counts_tokens_outside_as_misses() -> None:
    inside = np.array([False, True])
    assert coverage.coverage(np.array([2, 2]), inside) == 0.5
    assert coverage.coverage(np.array([1, 3]), inside) == 0.75
    assert coverage.coverage(np.array([0, 0]), inside) == 0.0


def write_traces(workdir: Path, rows: list[dict[str, Any]]) -> artifact.Artifact:
    """A traces artifact that holds only what the vocabulary reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with artifact.claim(workdir, "traces", "t") as folder:
        pq.write_table(pa.Table.from_pylist(rows), folder.path / "traces.parquet")
        return folder.commit(version=1, recipe={}, inputs={}, content="traces", files=["traces.parquet"])


@pytest.fixture
def traces(tmp_path: Path) -> artifact.Artifact:
    """Tokens 300 to 319 are said, 319 thrice; 400 only in validation, half of what is said there."""
    rows = [
        {"split": "train", "input_ids": [0, *range(300, 320), 319, 319], "loss_mask": [0] + [1] * 22},
        {"split": "validation", "input_ids": [300, 400, 319, 400], "loss_mask": [1] * 4},
    ]
    return write_traces(tmp_path, rows)


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders without the picture, which takes a third of a second."""
    monkeypatch.setattr(report, "picture", lambda figures: b"")


@pytest.mark.usefixtures("no_picture")
def test_the_stage(tmp_path: Path, traces: artifact.Artifact, make_config: Make) -> None:
    config = make_config(vocabulary={"size": 42, "must_keep": [450]})
    made = vocabulary.run(tmp_path, config, traces)
    t2d, d2t = vocabulary.load(made.folder)
    assert np.flatnonzero(t2d).tolist() == [0, *range(300, 320), 450, *CONTROL]
    assert np.array_equal(np.arange(42) + d2t, np.flatnonzero(t2d))
    counts = made.manifest().counts
    assert (counts["size"], counts["target_size"], counts["forced"]) == (42, 512, 21)
    assert counts["unseen"] == 22  # 0 is not supervised
    assert (counts["coverage_train"], counts["coverage_validation"]) == (1.0, 0.5)
    assert vocabulary.run(tmp_path, config, traces) == made
    assert vocabulary.key(config, traces) == made.key
    assert vocabulary.key(make_config(vocabulary={"size": 43, "must_keep": [450]}), traces) != made.key


@pytest.mark.usefixtures("no_picture")
def test_coverage_by_size_is_that_of_each_vocabulary_made(
    tmp_path: Path, traces: artifact.Artifact, make_config: Make
) -> None:
    """By hand: 20 control tokens say nothing, then 319 (3 of 22), then 300, 301 … (1 of 22 each), 400 at the end."""
    config = make_config(vocabulary={"size": 25, "sweep": [21, 22, 40, 512, 9, 513]})
    figures = json.loads((vocabulary.run(tmp_path, config, traces).folder / report.FIGURES).read_text())
    assert figures["by_size"]["size"] == [21, 22, 25, 40, 512]  # 9 are fewer than the control tokens, 513 too many
    assert figures["by_size"]["train"] == pytest.approx([3 / 22, 4 / 22, 7 / 22, 1, 1], abs=1e-6)
    assert figures["by_size"]["validation"] == [0.25, 0.5, 0.5, 0.5, 1]
    assert figures["coverage"] == {"train": pytest.approx(7 / 22, abs=1e-6), "validation": 0.5}
    for size, train in zip(figures["by_size"]["size"], figures["by_size"]["train"], strict=True):
        alone = vocabulary.run(tmp_path / str(size), make_config(vocabulary={"size": size}), traces)
        assert alone.manifest().counts["coverage_train"] == train


@pytest.mark.usefixtures("no_picture")
def test_other_sizes_leave_what_the_next_stages_read(
    tmp_path: Path, traces: artifact.Artifact, make_config: Make
) -> None:
    """No extraction and no training follows from asking for other sizes: content names the maps alone."""
    first, second = (
        vocabulary.run(tmp_path, make_config(vocabulary={"size": 42, "sweep": sweep}), traces)
        for sweep in ([30], [30, 60])
    )
    assert first.content == second.content
    sizes = [json.loads((made.folder / report.FIGURES).read_text())["by_size"]["size"] for made in (first, second)]
    assert sizes == [[30, 42], [30, 42, 60]]


def test_the_page_shows_table_and_picture(tmp_path: Path, traces: artifact.Artifact, make_config: Make) -> None:
    made = vocabulary.run(tmp_path, make_config(vocabulary={"size": 42, "sweep": [30, 60]}), traces)
    page = report.markdown(made.folder)
    assert (made.folder / report.PICTURE).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "](data:image/png;base64,iVBOR" in page
    assert "| 42 | 100.00% | 50.00% |" in page
    assert len(page.encode()) < 100_000


def test_a_kept_mapping_is_unchanged_and_what_it_lacks_is_named(
    tmp_path: Path, traces: artifact.Artifact, make_config: Make
) -> None:
    """It lacks all control tokens but three, and covers 300 to 303 of the traces."""
    selected = np.array([5, 300, 301, 302, 303, 488, 489, 490])
    t2d, d2t = vocabulary.mappings(selected, 512)
    (tmp_path / "warm").mkdir()
    save_file({"t2d": t2d, "d2t": d2t}, tmp_path / "warm" / "model.safetensors")
    config = make_config(
        vocabulary={"mapping": "init_from", "size": 8, "sweep": [40]}, drafter={"init_from": str(tmp_path / "warm")}
    )
    made = vocabulary.run(tmp_path, config, traces)
    assert [part.tolist() for part in vocabulary.load(made.folder)] == [t2d.tolist(), d2t.tolist()]
    counts = made.manifest().counts
    assert (counts["coverage_train"], counts["coverage_validation"]) == (pytest.approx(4 / 22, abs=1e-6), 0.25)
    assert counts["control_tokens_missing"] == 17
    figures = json.loads((made.folder / report.FIGURES).read_text())
    assert [token["id"] for token in figures["control_tokens_missing"]] == [*range(491, 508)]
    page = report.markdown(made.folder)
    assert "kept from the warm start" in page
    assert "&lt;/think&gt;" in page
    chosen = make_config(vocabulary={"size": 42, "sweep": [40]}, drafter={"init_from": str(tmp_path / "warm")})
    assert vocabulary.key(config, traces) != vocabulary.key(chosen, traces)
