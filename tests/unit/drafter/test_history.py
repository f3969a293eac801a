"""Figures of a training from lines written by hand, the page and the picture made of them."""

from __future__ import annotations

import base64
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafter import curves, history, page

Line = dict[str, Any]


def begun(steps: int = 6, devices: int = 1) -> Line:
    """What a process writes first."""
    return {"training": {"steps": steps, "epochs": 2, "devices": devices}}


def trained(step: int, epoch: int, time: float, loss: Any = 2.0, tokens: int = 50) -> Line:
    """A logged step that took 100 ms, as speculators times it."""
    figures = {"loss": loss, "full_acc_0": 0.6, "full_acc_1": 0.4, "cond_acc_0": 0.6, "cond_acc_1": 0.7}
    profile = {"tokens_per_s": 10.0 * tokens, "step_ms": 100.0}
    return {"time": time, "train": figures, "profile": profile, "epoch": epoch, "lr": 3e-5, "global_step": step}


def validated(epoch: int, loss: Any = 1.5) -> Line:
    """An epoch's validation."""
    return {"val": {"loss_epoch": loss, "full_acc_0_epoch": 0.5, "full_acc_1_epoch": 0.25}, "epoch": epoch}


REPLAYED = {"accepted_length": 1.9, "acceptance_per_position": [0.6, 0.3], "drafts": 10}
LINES = [
    begun(10),
    *[trained(step, 0, 100 + step, loss) for step, loss in ((0, 4.0), (2, 3.0), (4, 2.0))],
    validated(0),
    *[trained(step, 1, 110 + step, 1.0) for step in (6, 8)],
    validated(1, 1.25),
]


def test_an_epoch_has_the_figures_of_its_lines() -> None:
    first, second = history.of(LINES, {0: REPLAYED}).epochs
    assert (first.epoch, first.step, first.train_loss, first.loss) == (0, 5, 3.0, 1.5)
    assert (first.accuracy, first.accepted_length, first.acceptance) == ((0.5, 0.25), 1.9, (0.6, 0.3))
    assert first.lr == "3e-05"
    assert (second.train_loss, second.loss, second.accepted_length, second.acceptance) == (1.0, 1.25, None, ())


def test_the_best_epoch_has_the_longest_accepted_length_and_not_the_lowest_loss() -> None:
    lengths = {0: REPLAYED, 1: REPLAYED | {"accepted_length": 1.8}}
    assert history.of(LINES, lengths).best == 0
    assert history.of(LINES, {0: REPLAYED, 1: REPLAYED}).best == 0
    assert history.of(LINES, {0: REPLAYED, 1: REPLAYED | {"accepted_length": 2.0}}).best == 1
    assert history.of(LINES, {}).best is None


def test_tokens_a_second_are_steps_over_time_of_all_devices_and_pauses_do_not_count() -> None:
    """A step of 50 tokens every half second on each of two devices: 200 a second, whatever one step took by itself."""
    lines = [trained(step, 0, 10 + step / 2) for step in (0, 2, 4)]
    assert history.throughput(lines, 2) == pytest.approx(200.0)
    later = [trained(step, 0, 1000 + step / 2) for step in (6, 8)]
    assert history.of([begun(devices=2), *lines, begun(devices=2), *later, validated(0)], {}).epochs[
        0
    ].tokens_per_s == (pytest.approx(200.0))
    assert history.throughput(lines[:1], 2) == pytest.approx(1000.0)  # nothing but the step itself to go by
    assert history.throughput([], 2) is None


def test_both_rates_of_muon_are_named() -> None:
    assert history.learning_rate({"Muon": 0.02, "AdamW": 3e-5}) == "Muon 0.02, AdamW 3e-05"


def folder_of(folder: Path, lines: list[Line], replays: dict[int, Line]) -> Path:
    """A drafter folder with these lines and replays."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
    for epoch, figures in replays.items():
        (folder / "checkpoints" / str(epoch)).mkdir(parents=True)
        (folder / "checkpoints" / str(epoch) / "replay.json").write_text(json.dumps(figures))
    return folder


def test_a_checkpoint_that_was_set_aside_is_no_epoch(tmp_path: Path) -> None:
    """The stage draws the curves while the training process renames what it found damaged."""
    folder = folder_of(tmp_path, LINES, {0: REPLAYED, 1: REPLAYED})
    (folder / "checkpoints" / "1").rename(folder / "checkpoints" / "1.damaged")
    assert [epoch.accepted_length for epoch in history.read(folder).epochs] == [1.9, None]
    (folder / "checkpoints" / "0" / "replay.json").write_bytes(b"")
    assert [epoch.accepted_length for epoch in history.read(folder).epochs] == [None, None]


def test_the_page_has_a_row_an_epoch_with_the_best_marked_and_the_curves(tmp_path: Path) -> None:
    text = page.markdown(folder_of(tmp_path, LINES, {0: REPLAYED, 1: REPLAYED | {"accepted_length": 1.85}}))
    assert "| **0 (best)** | 3.0000 | 1.5000 | 0.50/0.25 | 1.9000 | 0.60/0.30 | 3e-05 | 50 |" in text
    assert "| 1 | 1.0000 | 1.2500 | 0.50/0.25 | 1.8500 | 0.60/0.30 | 3e-05 | 50 |" in text
    found = re.search(r"data:image/png;base64,([A-Za-z0-9+/=]+)\)", text)
    assert found is not None
    assert base64.b64decode(found[1]).startswith(b"\x89PNG")


def test_figures_that_are_not_finite_are_text_and_flagged(tmp_path: Path) -> None:
    """Field report 64: acc NaN and loss inf are shown as such and the page says so; what is stored is strict JSON."""
    wrong = {"val": {"loss_epoch": "inf", "full_acc_0_epoch": "nan"}, "epoch": 0}
    folder = folder_of(tmp_path, [begun(), trained(0, 0, 1.0, "nan"), trained(2, 0, 2.0), wrong], {})
    (epoch,) = history.read(folder).epochs
    assert math.isinf(epoch.loss)
    assert math.isnan(epoch.accuracy[0])
    text = page.markdown(folder)
    assert "| 0 | nan | inf | nan | n/a | n/a | 3e-05 |" in text
    assert "**Not finite:** loss_epoch of epoch 0, full_acc_0_epoch of epoch 0." in text


def test_skipped_steps_are_told(tmp_path: Path) -> None:
    line = {"skipped": {"rows": [3]}, "epoch": 0, "global_step": 1}
    assert "1 steps had no supervised token" in page.markdown(folder_of(tmp_path, [*LINES, line], {}))


def test_a_page_before_the_first_line_and_the_first_epoch(tmp_path: Path) -> None:
    assert "No epoch is finished yet" in page.markdown(tmp_path)
    assert "base64" not in page.markdown(tmp_path)
    assert "base64" in page.markdown(folder_of(tmp_path, LINES[:3], {}))


def test_a_page_of_many_epochs_and_steps_stays_under_100_kb(tmp_path: Path) -> None:
    lines, replays = [begun()], {}
    for epoch in range(30):
        lines += [
            trained(epoch * 1000 + step, epoch, float(epoch * 1000 + step), 3 + math.sin(step * 7.3))
            for step in range(1000)
        ]
        lines.append(validated(epoch, 2 + math.cos(epoch)))
        replays[epoch] = REPLAYED | {"acceptance_per_position": [0.7 - 0.1 * k + 0.01 * (epoch % 7) for k in range(8)]}
    assert len(page.markdown(folder_of(tmp_path, lines, replays))) < 100_000


def test_the_picture_is_written_whole(tmp_path: Path) -> None:
    curves.write(tmp_path, history.History())
    assert list(tmp_path.iterdir()) == []
    curves.write(tmp_path, history.of(LINES, {0: REPLAYED}))
    assert [path.name for path in tmp_path.iterdir()] == [curves.FILE]
    assert (tmp_path / curves.FILE).read_bytes().startswith(b"\x89PNG")


def test_smoothing_means_over_the_last_steps_and_leaves_out_what_is_not_finite() -> None:
    assert curves.smooth([1.0, 5.0]) == [1.0, 5.0]
    hundred = [float(value) for value in range(100)]
    assert curves.smooth(hundred)[1:] == [(before + after) / 2 for before, after in pairwise(hundred)]
    assert curves.smooth([*hundred[:50], math.nan, *hundred[51:]])[50] == 49.0
