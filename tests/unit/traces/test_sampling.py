"""How prompts are asked: shares of the modes, seeds, request fields, and what names a row."""

from __future__ import annotations

from collections import Counter

import pytest

from slipstream.config import Sampling, TracesConfig
from slipstream.traces.sampling import draw, fields, row_key

KEYS = [f"key {i}" for i in range(10_000)]
COLD, WARM, HOT = (Sampling(temperature=t) for t in (0.0, 0.6, 1.0))


def weighted(*weights: float, seed: int = 0) -> TracesConfig:
    """Modes of temperature 0, 1, 2, … with these weights."""
    return TracesConfig(
        sampling=[Sampling(weight=weight, temperature=i) for i, weight in enumerate(weights)], seed=seed
    )


def drawn(config: TracesConfig) -> list[int]:
    """Which mode every key draws."""
    return [config.sampling.index(draw(config, key)) for key in KEYS]


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (5, 3, 2), (0.01, 0.09, 0.4, 0.5), (90, 9, 1)])
def test_shares_are_the_weights(weights: tuple[float, ...]) -> None:
    counts = Counter(drawn(weighted(*weights)))
    shares = [counts[mode] / len(KEYS) for mode in range(len(weights))]
    assert shares == pytest.approx([weight / sum(weights) for weight in weights], abs=0.02)


def test_one_mode_is_everybodys() -> None:
    assert set(drawn(weighted(0.3))) == {0}


def test_only_the_ratio_of_weights_counts() -> None:
    assert drawn(weighted(1, 3)) == drawn(weighted(2, 6))


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ((3, 1), (1, 1), 1 / 4),  # the boundary goes from 3/4 to 1/2
        ((1, 1, 2), (1, 1, 6), 1 / 8 + 1 / 4),  # the boundaries go from 1/4 and 1/2 to 1/8 and 1/4
    ],
    ids=["two modes", "three modes"],
)
def test_more_weight_at_the_end_moves_keys_only_towards_it(
    before: tuple[float, ...], after: tuple[float, ...], share: float
) -> None:
    moves = list(zip(drawn(weighted(*before)), drawn(weighted(*after)), strict=True))
    assert all(new >= old for old, new in moves)
    assert sum(new != old for old, new in moves) / len(KEYS) == pytest.approx(share, abs=0.02)


def test_more_weight_in_the_middle_only_attracts() -> None:
    moves = zip(drawn(weighted(1, 1, 1)), drawn(weighted(1, 3, 1)), strict=True)
    assert {new for old, new in moves if new != old} == {1}


def test_a_seed_deals_anew() -> None:
    changed = sum(a != b for a, b in zip(drawn(weighted(1, 1)), drawn(weighted(1, 1, seed=1)), strict=True))
    assert changed / len(KEYS) == pytest.approx(0.5, abs=0.02)


def asked_by(mode: Sampling, seed: int = 0) -> TracesConfig:
    """A configuration with one mode."""
    return TracesConfig(sampling=[mode], max_tokens=7, seed=seed)


def test_greedy_has_no_seed() -> None:
    assert fields(asked_by(COLD), "k") == {"max_tokens": 7, "temperature": 0.0}


def test_greedy_leaves_the_cuts_of_sampling_out() -> None:
    assert fields(asked_by(Sampling(top_p=0.9, top_k=40)), "k") == {"max_tokens": 7, "temperature": 0.0}


def test_fields_of_a_sampling_mode() -> None:
    made = fields(asked_by(Sampling(temperature=0.6, top_p=0.95, top_k=40, reasoning_effort="high")), "k")
    seed = made.pop("seed")
    assert made == {"max_tokens": 7, "temperature": 0.6, "top_p": 0.95, "top_k": 40, "reasoning_effort": "high"}
    assert type(seed) is int
    assert 0 <= seed < 2**31  # what engines take as a seed everywhere


def test_top_k_off_is_said() -> None:
    """Left out, vLLM would take the verifier's own from its generation_config.json."""
    assert fields(asked_by(WARM), "k")["top_k"] == -1


def test_a_request_is_the_same_when_repeated() -> None:
    assert fields(asked_by(WARM), "k", 2) == fields(asked_by(WARM), "k", 2)


def test_seeds_differ_by_key_turn_and_configuration() -> None:
    made = {fields(asked_by(WARM, seed), key, turn)["seed"] for key in "abc" for turn in (0, 1, 2) for seed in (0, 1)}
    assert len(made) == 18


def test_ten_thousand_keys_share_hardly_a_seed() -> None:
    made = {fields(asked_by(WARM), key)["seed"] for key in KEYS}
    assert len(made) > len(KEYS) - 5  # 0.02 collisions are to be expected among 2**31


def test_no_thinking_is_said_in_both_dialects() -> None:
    made = fields(asked_by(Sampling(thinking=False)), "k")
    assert made["chat_template_kwargs"] == {"thinking": False, "enable_thinking": False}
    assert "chat_template_kwargs" not in fields(asked_by(COLD), "k")


def test_a_prompt_gets_the_fields_of_the_mode_it_draws() -> None:
    config = TracesConfig(sampling=[COLD, WARM, HOT])
    for key in KEYS[:50]:
        assert fields(config, key)["temperature"] == draw(config, key).temperature
    assert {fields(config, key)["temperature"] for key in KEYS[:50]} == {0.0, 0.6, 1.0}


BASE = asked_by(WARM)


@pytest.mark.parametrize(
    "other",
    [
        BASE.model_copy(update={"max_tokens": 8}),
        BASE.model_copy(update={"seed": 1}),
        asked_by(Sampling(temperature=0.7)),
        asked_by(Sampling(temperature=0.6, top_p=0.9)),
        asked_by(Sampling(temperature=0.6, top_k=5)),
        asked_by(Sampling(temperature=0.6, thinking=False)),
        asked_by(Sampling(temperature=0.6, reasoning_effort="low")),
    ],
    ids=["max_tokens", "seed", "temperature", "top_p", "top_k", "thinking", "effort"],
)
def test_asking_differently_is_another_row(other: TracesConfig) -> None:
    assert row_key(other, "k") != row_key(BASE, "k")


@pytest.mark.parametrize(
    "update",
    [
        {"concurrency": 7},
        {"request_timeout_s": 3.0},
        {"max_attempts": 9},
        {"keep_truncated": False},
        {"reasoning": False},
        {"min_supervised_share": 0.2},
    ],
    ids=lambda update: next(iter(update)),
)
def test_what_does_not_change_the_request_keeps_the_row(update: dict[str, float]) -> None:
    assert row_key(BASE.model_copy(update=update), "k") == row_key(BASE, "k")


def test_every_prompt_has_its_row() -> None:
    assert len({row_key(asked_by(COLD), key) for key in KEYS[:1000]}) == 1000


def test_a_greedy_row_does_not_depend_on_the_seed() -> None:
    assert row_key(asked_by(COLD, 0), "k") == row_key(asked_by(COLD, 1), "k")


def test_a_changed_weight_asks_again_only_for_those_that_moved() -> None:
    before, after = weighted(3, 1), weighted(1, 1)
    for key in KEYS[:300]:
        moved = draw(before, key).temperature != draw(after, key).temperature
        assert (row_key(before, key) != row_key(after, key)) == moved
