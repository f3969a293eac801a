"""The prompt set: the artifact in which the splits are decided."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.artifact import Artifact
from slipstream.config import PromptsConfig
from slipstream.errors import InputError, StageFailed
from slipstream.traces import prompt_set
from slipstream.traces.prompts import parse

TEXTS = [f"prompt {i}" for i in range(60)]


@pytest.fixture
def run(tmp_path: Path, write_prompts: Callable[..., str]) -> Callable[..., Artifact]:
    """Makes a prompt set from rows, in a work directory of the test's own."""

    def make(rows: list[Any], held_out: list[Any] | None = None, name: str = "prompts.jsonl", **more: Any) -> Artifact:
        given: dict[str, Any] = {"held_out_ratio": 0.2, "val_ratio": 0.2} | more
        if held_out is not None:
            given["held_out_sources"] = [write_prompts(held_out, "held-out.jsonl")]
        return prompt_set.run(tmp_path / "work", PromptsConfig(sources=[write_prompts(rows, name)], **given))

    return make


def texts(artifact: Artifact, *parts: str) -> set[str]:
    """The texts in some splits."""
    return {prompt.messages[0]["content"] for part in parts for prompt in prompt_set.load(artifact, part)}


def test_every_prompt_is_in_exactly_one_split(run: Callable[..., Artifact]) -> None:
    made = run(TEXTS)
    parts = [list(prompt_set.load(made, part)) for part in ("train", "validation", "held_out")]
    assert sorted(p.messages[0]["content"] for part in parts for p in part) == sorted(TEXTS)
    counts = made.manifest().counts
    assert [counts[part] for part in ("train", "validation", "held_out")] == [len(part) for part in parts]
    assert all([p.key for p in part] == sorted(p.key for p in part) for part in parts)
    assert parts[0][0] in [parse({"prompt": text}) for text in TEXTS]


def test_held_out_prompts_are_never_trained_on(run: Callable[..., Artifact]) -> None:
    held_out = ["other", TEXTS[3], {"id": "7", "prompt": TEXTS[5], "kind": "k"}]
    made = run(TEXTS, held_out, held_out_ratio=0)
    assert texts(made, "held_out") == {"other", TEXTS[3], TEXTS[5]}
    assert texts(made, "train", "validation") == set(TEXTS) - {TEXTS[3], TEXTS[5]}


def test_a_second_run_takes_the_folder(run: Callable[..., Artifact]) -> None:
    first = run(TEXTS)
    started = first.manifest().started
    assert run(TEXTS) == first
    assert first.manifest().started == started


def test_the_same_bytes_elsewhere_are_the_same_source(run: Callable[..., Artifact]) -> None:
    assert run(TEXTS, name="other/place.jsonl") == run(TEXTS)


def test_other_bytes_at_the_same_place_are_another_source(run: Callable[..., Artifact]) -> None:
    first = run(TEXTS)
    second = run([*TEXTS, "one more"])
    assert second.key != first.key
    assert second.content != first.content


def test_order_and_runtime_fields_do_not_change_the_content(run: Callable[..., Artifact]) -> None:
    first = run(TEXTS)
    assert run(TEXTS[::-1]).content == first.content
    assert run(TEXTS, expected_prompts=5) == first
    assert run(TEXTS, split_seed=1).content != first.content


def test_a_damaged_folder_is_made_again_with_the_same_content(run: Callable[..., Artifact]) -> None:
    first = run(TEXTS)
    data = (first.folder / "train.jsonl").read_bytes()
    (first.folder / "train.jsonl").unlink()
    assert run(TEXTS) == first
    assert (first.folder / "train.jsonl").read_bytes() == data
    shutil.rmtree(first.folder)
    assert run(TEXTS) == first


def test_another_held_out_prompt_leaves_the_traced_part_alone(run: Callable[..., Artifact]) -> None:
    first = run(TEXTS, ["a"], held_out_ratio=0)
    second = run(TEXTS, ["a", "b"], held_out_ratio=0)
    assert second.parts["traced"] == first.parts["traced"]
    assert second.parts["held_out"] != first.parts["held_out"]


def test_another_training_prompt_leaves_the_held_out_part_alone(run: Callable[..., Artifact]) -> None:
    first = run(TEXTS, ["a"], held_out_ratio=0)
    second = run([*TEXTS, "more"], ["a"], held_out_ratio=0)
    assert second.parts["held_out"] == first.parts["held_out"]
    assert second.parts["traced"] != first.parts["traced"]


def test_rejects_and_repeats_are_listed(run: Callable[..., Artifact]) -> None:
    made = run([*TEXTS, {"id": "bad", "prompt": ""}, TEXTS[0]])
    listed = [json.loads(text) for text in (made.folder / "rejects.jsonl").read_text().splitlines()]
    assert [(row["id"], row["row"], row["reason"]) for row in listed] == [("bad", 61, "an empty user turn")]
    assert listed[0]["file"].endswith("prompts.jsonl")
    counts = made.manifest().counts
    assert (counts["rejected"], counts["repeated"]) == (1, 1)


def test_too_many_rejects_fail(run: Callable[..., Artifact]) -> None:
    bad: list[Any] = [{"prompt": ""}] * 4
    assert run([*TEXTS[:36], *bad], max_rejected_share=0.1).manifest().counts["rejected"] == 4
    with pytest.raises(StageFailed, match=r"4 of 39 rows are unusable.* row 36 \(an empty user turn\)"):
        run([*TEXTS[:35], *bad], max_rejected_share=0.1)


def test_nothing_usable_is_a_failure(run: Callable[..., Artifact]) -> None:
    with pytest.raises(StageFailed, match="no usable prompt"):
        run([{"prompt": ""}], max_rejected_share=0.99)


def test_too_few_prompts_are_refused(run: Callable[..., Artifact]) -> None:
    with pytest.raises(InputError, match="too few"):
        run(TEXTS[:2])


def test_a_limit_takes_the_first_in_key_order(run: Callable[..., Artifact]) -> None:
    made = run(TEXTS, limit=10)
    first = sorted(TEXTS, key=lambda text: parse({"prompt": text}).key)[:10]
    assert texts(made, "train", "validation", "held_out") == set(first)
    assert all(made.manifest().counts[part] for part in ("train", "validation", "held_out"))
