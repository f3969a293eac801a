"""Three splits that partition, hold still and are never empty without need."""

from __future__ import annotations

import hashlib
import json
from itertools import count

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slipstream.traces import splits
from slipstream.traces.prompts import Prompt, parse

TEXTS = st.lists(st.text("abc", min_size=1, max_size=6), unique=True, max_size=30)
RATIO = st.floats(0, 0.9)


def prompt(text: str) -> Prompt:
    """A prompt of one turn."""
    return parse({"prompt": text})


def position(text: str, seed: int) -> float:
    """Where a text lies in [0, 1): the first eight bytes of a SHA-256, worked out here."""
    content = json.dumps([[{"content": text, "role": "user"}], []], separators=(",", ":"), sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()[:32]
    return int(hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()[:16], 16) / 2**64


@given(TEXTS, RATIO, RATIO, st.integers(0, 3))
def test_partition_in_the_order_given(texts: list[str], held_out: float, validation: float, seed: int) -> None:
    given_prompts = [prompt(text) for text in texts]
    parts = splits.split(given_prompts, held_out, validation, seed)
    assert sorted(p.key for part in parts.values() for p in part) == sorted(p.key for p in given_prompts)
    for part in parts.values():
        assert part == [p for p in given_prompts if p in part]


NUMBERS = st.sets(st.integers(0, 300), min_size=10, max_size=40)


@given(NUMBERS, NUMBERS)
def test_a_place_does_not_depend_on_the_other_prompts(some: set[int], more: set[int]) -> None:
    at = [position(f"text {i}", 0) for i in some]
    assume(any(value < 0.3 for value in at) and any(0.3 <= value < 0.51 for value in at) and max(at) >= 0.51)
    few = splits.split([prompt(f"text {i}") for i in some], 0.3, 0.3, 0)
    many = splits.split([prompt(f"text {i}") for i in some | more], 0.3, 0.3, 0)
    mine = {p.key for part in few.values() for p in part}
    assert {name: {p.key for p in part} for name, part in few.items()} == {
        name: {p.key for p in part} & mine for name, part in many.items()
    }


@pytest.mark.parametrize("seed", [0, 1])
def test_places_are_positions_of_a_hash(seed: int) -> None:
    texts = [f"text {i}" for i in range(200)]
    parts = splits.split([prompt(text) for text in texts], 0.2, 0.5, seed)
    at = {prompt(text).key: position(text, seed) for text in texts}
    assert {p.key for p in parts["held_out"]} == {key for key, value in at.items() if value < 0.2}
    assert {p.key for p in parts["validation"]} == {key for key, value in at.items() if 0.2 <= value < 0.6}


def test_ids_and_kinds_do_not_move_a_prompt() -> None:
    row = {"prompt": "x"}
    assert splits.position(parse(row), 0) == splits.position(parse({**row, "id": "a", "kind": "k"}), 0)


def test_ratios_on_many_prompts() -> None:
    parts = splits.split([prompt(f"text {i}") for i in range(5000)], 0.1, 0.2, 0)
    assert len(parts["held_out"]) == pytest.approx(500, abs=70)  # three standard deviations are 64
    assert len(parts["validation"]) == pytest.approx(900, abs=90)
    assert len(parts["train"]) == pytest.approx(3600, abs=110)


@given(st.lists(st.text(max_size=8).filter(str.strip), unique=True, min_size=10, max_size=10), st.integers(0, 50))
def test_ten_prompts_leave_no_split_empty(texts: list[str], seed: int) -> None:
    parts = splits.split([prompt(text) for text in texts], 0.2, 0.2, seed)
    assert all(parts.values())


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0.2), (0.2, 0.36), (0.36, 1), (0, 0.36)], ids=["held out", "validation", "train", "no train"]
)
def test_ten_prompts_that_all_fall_together_leave_no_split_empty(low: float, high: float) -> None:
    texts = (f"text {i}" for i in count())
    chosen = []
    while len(chosen) < 10:
        if low <= position(text := next(texts), 0) < high:
            chosen.append(prompt(text))
    parts = splits.split(chosen, 0.2, 0.2, 0)
    assert {name: len(part) > 0 for name, part in parts.items()} == dict.fromkeys(splits.SPLITS, True)


def test_a_ratio_of_zero_holds_nothing_out() -> None:
    parts = splits.split([prompt(f"text {i}") for i in range(10)], 0, 0.2, 0)
    assert parts["held_out"] == []
    assert parts["validation"]
