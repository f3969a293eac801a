"""Three splits that partition, hold still and are never empty without need."""

from __future__ import annotations

import hashlib
import json
from itertools import count
from random import Random

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


def split(texts: list[str], held_out: float, validation: float, seed: int) -> dict[str, list[str]]:
    """The texts by split."""
    at = {text: splits.position(prompt(text), seed) for text in texts}
    splitter = splits.Splitter(at.values(), held_out, validation)
    parts: dict[str, list[str]] = {name: [] for name in splits.SPLITS}
    for text in texts:
        parts[splitter.place(at[text])].append(text)
    assert splitter.sizes == {name: len(part) for name, part in parts.items()}
    return parts


@given(TEXTS, RATIO, RATIO, st.integers(0, 3))
def test_partition(texts: list[str], held_out: float, validation: float, seed: int) -> None:
    parts = split(texts, held_out, validation, seed)
    assert sorted(text for part in parts.values() for text in part) == sorted(texts)


@given(TEXTS, RATIO, RATIO, st.randoms())
def test_order_does_not_matter(texts: list[str], held_out: float, validation: float, random: Random) -> None:
    turned = list(texts)
    random.shuffle(turned)
    one, other = split(texts, held_out, validation, 0), split(turned, held_out, validation, 0)
    assert {name: set(part) for name, part in one.items()} == {name: set(part) for name, part in other.items()}


NUMBERS = st.sets(st.integers(0, 300), min_size=10, max_size=40)


@given(NUMBERS, NUMBERS)
def test_a_place_does_not_depend_on_the_other_prompts(some: set[int], more: set[int]) -> None:
    at = [position(f"text {i}", 0) for i in some]
    assume(any(value < 0.3 for value in at) and any(0.3 <= value < 0.51 for value in at) and max(at) >= 0.51)
    few = split([f"text {i}" for i in some], 0.3, 0.3, 0)
    many = split([f"text {i}" for i in some | more], 0.3, 0.3, 0)
    mine = {text for part in few.values() for text in part}
    assert {name: set(part) for name, part in few.items()} == {name: set(part) & mine for name, part in many.items()}


@pytest.mark.parametrize("seed", [0, 1])
def test_places_are_positions_of_a_hash(seed: int) -> None:
    texts = [f"text {i}" for i in range(200)]
    parts = split(texts, 0.2, 0.5, seed)
    at = {text: position(text, seed) for text in texts}
    assert parts["held_out"] == [text for text, value in at.items() if value < 0.2]
    assert parts["validation"] == [text for text, value in at.items() if 0.2 <= value < 0.6]


def test_ids_and_kinds_do_not_move_a_prompt() -> None:
    row = {"prompt": "x"}
    assert splits.position(parse(row), 0) == splits.position(parse({**row, "id": "a", "kind": "k"}), 0)


def test_ratios_on_many_prompts() -> None:
    parts = split([f"text {i}" for i in range(5000)], 0.1, 0.2, 0)
    assert len(parts["held_out"]) == pytest.approx(500, abs=70)  # three standard deviations are 64
    assert len(parts["validation"]) == pytest.approx(900, abs=90)
    assert len(parts["train"]) == pytest.approx(3600, abs=110)


@given(st.lists(st.text(max_size=8).filter(str.strip), unique=True, min_size=10, max_size=10), st.integers(0, 50))
def test_ten_prompts_leave_no_split_empty(texts: list[str], seed: int) -> None:
    assert all(split(texts, 0.2, 0.2, seed).values())


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0.2), (0.2, 0.36), (0.36, 1), (0, 0.36)], ids=["held out", "validation", "train", "no train"]
)
def test_ten_prompts_that_all_fall_together_leave_no_split_empty(low: float, high: float) -> None:
    texts = (f"text {i}" for i in count())
    chosen: list[str] = []
    while len(chosen) < 10:
        if low <= position(text := next(texts), 0) < high:
            chosen.append(text)
    assert all(split(chosen, 0.2, 0.2, 0).values())


@pytest.mark.parametrize(
    ("positions", "held_out", "validation", "train"),
    [
        ([0.9, 0.5, 0.7, 0.6], [0.5], [0.6], [0.7, 0.9]),  # all in train: the lowest two leave
        ([0.19, 0.1, 0.15, 0.12], [0.12, 0.15], [0.1], [0.19]),  # all held out: train takes the highest
        ([0.21, 0.3, 0.25], [0.21], [0.25], [0.3]),  # all in validation
        ([0.1, 0.15, 0.5], [0.15], [0.1], [0.5]),
        ([0.1, 0.9], [0.1], [], [0.9]),  # nobody has one to give
        ([0.9], [], [], [0.9]),
        ([], [], [], []),
    ],
)
def test_an_empty_split_takes_the_nearest_of_the_largest(
    positions: list[float], held_out: list[float], validation: list[float], train: list[float]
) -> None:
    splitter = splits.Splitter(positions, 0.2, 0.2)
    found = {name: sorted(at for at in positions if splitter.place(at) == name) for name in splits.SPLITS}
    assert found == {"held_out": held_out, "validation": validation, "train": train}


def test_a_ratio_of_zero_holds_nothing_out() -> None:
    parts = split([f"text {i}" for i in range(10)], 0, 0.2, 0)
    assert parts["held_out"] == []
    assert parts["validation"]
