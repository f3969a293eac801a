"""vLLM's cumulative counters and their differences."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from slipstream.acceptance.counters import Counters, parse
from slipstream.errors import ServerError

BEFORE = {"drafts": 100, "draft_tokens": 300, "accepted_tokens": 150, "per_position": [80, 50, 20]}
AFTER = {"drafts": 300, "draft_tokens": 900, "accepted_tokens": 550, "per_position": [240, 190, 120]}


def page(*engines: dict[str, Any]) -> str:
    """The page as prometheus_client writes it for vLLM's counters, one series an engine."""
    registry = CollectorRegistry()
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        counter = Counter(f"vllm:spec_decode_num_{name}", "x", ["model_name", "engine"], registry=registry)
        for i, engine in enumerate(engines):
            counter.labels("m", str(i)).inc(engine[name])
    labels = ["model_name", "engine", "position"]
    counter = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "x", labels, registry=registry)
    for i, engine in enumerate(engines):
        for position, value in enumerate(engine["per_position"]):
            counter.labels("m", str(i), str(position)).inc(value)
    other = Counter("vllm:generation_tokens", "x", registry=registry)
    other.inc(12345)
    return generate_latest(registry).decode()


def test_the_published_example() -> None:
    counted = parse(page(AFTER)).since(parse(page(BEFORE)))
    assert counted.mean_accepted_length == 3.0
    assert counted.acceptance_rate == pytest.approx(0.667, abs=5e-4)
    assert counted.rate_per_position == pytest.approx([160 / 200, 140 / 200, 100 / 200])


def test_a_second_engine_of_equal_deltas_changes_no_figure() -> None:
    later = {"drafts": 1200, "draft_tokens": 3600, "accepted_tokens": 400, "per_position": [160, 140, 100]}
    start = {"drafts": 1000, "draft_tokens": 3000, "accepted_tokens": 0, "per_position": [0, 0, 0]}
    counted = parse(page(AFTER, later)).since(parse(page(BEFORE, start)))
    assert (counted.drafts, counted.draft_tokens, counted.accepted) == (400, 1200, 800)
    assert counted.mean_accepted_length == 3.0
    assert counted.acceptance_rate == pytest.approx(2 / 3)
    assert counted.rate_per_position == pytest.approx([0.8, 0.7, 0.5])


@pytest.mark.parametrize("name", ["drafts", "draft_tokens", "accepted_tokens"])
def test_a_restart_is_an_error(name: str) -> None:
    with pytest.raises(ServerError, match="restarted"):
        parse(page(AFTER | {name: BEFORE[name] - 1})).since(parse(page(BEFORE)))


def test_a_position_that_was_not_counted_before_starts_at_zero() -> None:
    counted = parse(page(AFTER)).since(parse(page(BEFORE | {"per_position": []})))
    assert counted.rate_per_position == pytest.approx([240 / 200, 190 / 200, 120 / 200])


def test_nothing_drafted_has_no_figures() -> None:
    counted = parse(page(AFTER)).since(parse(page(AFTER)))
    assert (counted.acceptance_rate, counted.mean_accepted_length, counted.rate_per_position) == (None, None, [])
    assert parse("# nothing\n") == Counters()


def test_ten_positions_are_in_numeric_order() -> None:
    rates = Counters(10, 110, 55, {i: 10 - i for i in range(11)}).rate_per_position
    assert rates == pytest.approx([(10 - i) / 10 for i in range(11)])
