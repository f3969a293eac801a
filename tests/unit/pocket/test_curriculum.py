"""Prompts: how many, how distinct, how split; the same seed, the same tasks."""

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from slipstream.pocket import VERIFIER
from slipstream.pocket.curriculum import KINDS, generate, is_held_out, prompt_space, sample, stream
from slipstream.pocket.prompts import main


def test_at_least_eight_kinds_and_fifty_thousand_prompts_of_each() -> None:
    assert len(KINDS) >= 8
    assert all(prompt_space(kind) >= 50_000 for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_among_draws_fit_the_stated_number_of_prompts(kind: str) -> None:
    """n draws from N equally likely prompts repeat about n²/2N times; the uneven draws of a kind may double that, and a
    space that were a third of what is stated would triple it."""
    rng, draws = Random(11), 4000
    repeats = draws - len({sample(kind, rng).prompt for _ in range(draws)})
    expected = draws**2 / 2 / prompt_space(kind)
    assert repeats <= 2 * expected + 4 * math.sqrt(2 * expected) + 4


def test_a_prompt_determines_its_trace() -> None:
    rng = Random(3)
    seen: dict[str, tuple[str, str]] = {}
    repeats = 0
    for _ in range(20_000):
        task = sample("count", rng)
        repeats += task.prompt in seen
        assert seen.setdefault(task.prompt, (task.thinking, task.answer)) == (task.thinking, task.answer)
    assert repeats > 1000


def test_generate_is_distinct_even_and_reproducible() -> None:
    tasks = generate(1003, seed=4)
    assert len({t.prompt for t in tasks}) == 1003
    counts = Counter(t.kind for t in tasks).values()
    assert max(counts) - min(counts) <= 1
    assert generate(1003, seed=4) == tasks
    assert generate(100, seed=4) == tasks[:100]
    assert generate(100, seed=5) != tasks[:100]


def test_generate_refuses_more_than_a_kind_has() -> None:
    with pytest.raises(ValueError, match="which has"):
        generate(len(KINDS) * 10_000_000, seed=0)


def test_a_tenth_of_the_prompts_is_held_out_by_the_hash_of_the_prompt() -> None:
    tasks = generate(4200, seed=8)
    share = sum(is_held_out(t.prompt) for t in tasks) / len(tasks)
    assert 0.08 < share < 0.12
    text = tasks[0].prompt
    assert is_held_out(text) == (int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 10 == 0)
    assert all(is_held_out(t.prompt) for t in generate(140, seed=8, held_out=True))


def test_the_training_stream_never_shows_a_held_out_prompt() -> None:
    supply = stream(1, held_out=False)
    assert not any(is_held_out(next(supply).prompt) for _ in range(3000))


def test_no_reasoning_template_covers_a_kind() -> None:
    """With numbers, names and letters blotted out, a kind still has many wordings."""
    for kind in KINDS:
        rng = Random(2)
        starts = {sample(kind, rng).thinking.split(". ")[0].split("? ")[0] for _ in range(300)}
        assert len(starts) >= 5


def test_the_prompt_file_has_one_object_a_line(tmp_path: Path) -> None:
    out = tmp_path / "new" / "prompts.jsonl"
    main(["--count", "30", "--seed", "6", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    tasks = generate(30, seed=6)
    assert [r["messages"] for r in rows] == [[{"role": "user", "content": t.prompt}] for t in tasks]
    assert [r["answer"] for r in rows] == [t.answer for t in tasks]
    assert rows[0]["id"] == f"{tasks[0].kind}-{hashlib.sha256(tasks[0].prompt.encode()).hexdigest()[:8]}"
    assert len({r["id"] for r in rows}) == 30
    assert [p.name for p in out.parent.iterdir()] == ["prompts.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "prompts.jsonl"
    out.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        main(["--count", "3", "--out", str(out)])
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("prompts.jsonl", "old")]


def test_the_verifier_is_there() -> None:
    assert (VERIFIER / "config.json").is_file()
