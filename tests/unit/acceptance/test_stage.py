"""The figures of an acceptance run from measurements made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream import artifact
from slipstream.acceptance import stage
from slipstream.acceptance.counters import Counters
from slipstream.acceptance.served import Measurement
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.errors import InputError
from slipstream.progress import silent
from slipstream.traces.trace import Trace

OUTPUTS = [(1, 2, 3, 4), (5, 6), (7, 8, 9, 10)]  # ten tokens


def measurement(seconds: float, outputs: list[tuple[int, ...]] = OUTPUTS, **counted: Any) -> Measurement:
    """One pass over three prompts."""
    traces = [Trace(f"k{i}", (0,), output, "stop", None, None) for i, output in enumerate(outputs)]
    return Measurement([[trace] for trace in traces], seconds, Counters(**counted))


ONE = {"drafts": 2, "draft_tokens": 6, "accepted": 3, "per_position": {0: 2, 1: 1, 2: 0}}
TWO = {"drafts": 8, "draft_tokens": 24, "accepted": 12, "per_position": {0: 6, 1: 4, 2: 2}}


@pytest.fixture
def measured() -> dict[str, list[Measurement]]:
    """Two rounds: the baseline takes 5 and 5 s, the drafter 2 and 3 s."""
    return {
        "baseline": [measurement(5), measurement(5)],
        "speculative": [measurement(2, **ONE), measurement(3, **TWO)],
    }


def test_figures_by_hand(measured: dict[str, list[Measurement]]) -> None:
    figures = stage.summarize(measured, "float32", 3)
    assert figures["acceptance_rate"] == pytest.approx(15 / 30)
    assert figures["mean_accepted_length"] == pytest.approx(1 + 15 / 10)
    assert figures["acceptance_per_position"] == pytest.approx([0.8, 0.5, 0.2])
    assert figures["tokens_per_second"] == {"baseline": 2.0, "speculative": 4.0}
    assert figures["speed_up"] == pytest.approx(2.0)
    assert figures["speed_up_per_round"] == pytest.approx([2.5, 5 / 3])
    assert (figures["prompts"], figures["output_tokens"]) == (3, 10)
    assert (figures["outputs_identical"], figures["outputs_different"]) == (True, 0)
    assert figures["verdict"] == "accepted"
    assert "untrained" not in figures


def test_one_other_token_is_one_other_output(measured: dict[str, list[Measurement]]) -> None:
    other = [OUTPUTS[0], (5, 7), OUTPUTS[2]]
    measured["speculative"][0] = measurement(2, other, **ONE)
    figures = stage.summarize(measured, "float32", 3)
    assert (figures["outputs_identical"], figures["outputs_different"]) == (False, 1)
    assert figures["verdict"] == "rejected"


@pytest.mark.parametrize("variant", ["baseline", "speculative"])
def test_outputs_that_differ_in_a_later_round_count_too(measured: dict[str, list[Measurement]], variant: str) -> None:
    counted = TWO if variant == "speculative" else {}
    measured[variant][1] = measurement(3, [OUTPUTS[0], (5, 7), OUTPUTS[2]], **counted)
    assert not stage.summarize(measured, "float32", 3)["outputs_identical"]


def test_the_untrained_drafter_is_the_floor(measured: dict[str, list[Measurement]]) -> None:
    floor = {"drafts": 10, "draft_tokens": 30, "accepted": 3, "per_position": {0: 3, 1: 0, 2: 0}}
    measured["untrained"] = [measurement(6, **floor), measurement(6, **floor)]
    figures = stage.summarize(measured, "float32", 3)
    assert figures["untrained"]["acceptance_rate"] == pytest.approx(0.1)
    assert figures["untrained"]["mean_accepted_length"] == pytest.approx(1.3)
    assert figures["untrained"]["acceptance_per_position"] == pytest.approx([0.3, 0, 0])
    assert figures["acceptance_rate"] == pytest.approx(0.5)
    assert figures["tokens_per_second"]["untrained"] == pytest.approx(20 / 12, abs=0.01)


def test_a_drafter_that_was_not_used_is_rejected(measured: dict[str, list[Measurement]]) -> None:
    measured["speculative"] = [measurement(2), measurement(3)]
    figures = stage.summarize(measured, "float32", 3)
    assert (figures["acceptance_rate"], figures["verdict"]) == (None, "rejected")


def test_the_speed_up_is_that_of_the_measured_speeds() -> None:
    """Not of the rounded ones: 1.01 / 1.00 would be five times the gain that was measured."""
    measured = {"baseline": [measurement(10 / 1.004)], "speculative": [measurement(10 / 1.006, **ONE)]}
    assert stage.summarize(measured, "float32", 3)["speed_up"] == pytest.approx(1.006 / 1.004, rel=1e-4)


def test_the_key_follows_drafter_and_held_out_prompts(make_config: Callable[..., RunConfig]) -> None:
    prompts = Artifact(path="p", stage="prompts", key="k", content="c", parts={"traced": "t", "held_out": "h"})
    drafter = Artifact(path="d", stage="drafter", key="k", content="d")
    key = stage.key(make_config(), prompts, drafter)
    assert stage.key(make_config(acceptance={"request_timeout_s": 5}), prompts, drafter) == key
    traced = prompts.model_copy(update={"content": "x", "parts": {"traced": "x", "held_out": "h"}})
    assert stage.key(make_config(), traced, drafter) == key
    held_out = prompts.model_copy(update={"parts": {"traced": "t", "held_out": "x"}})
    others = [
        stage.key(make_config(), held_out, drafter),
        stage.key(make_config(), prompts, drafter.model_copy(update={"content": "x"})),
        stage.key(make_config(acceptance={"draft_tokens": 5}), prompts, drafter),
        stage.key(make_config(verifier={"dtype": "bfloat16"}), prompts, drafter),
    ]
    assert key not in others
    assert len(set(others)) == len(others)


FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize("which", ["1", "initial"])
def test_contexts_beyond_the_drafters_positions_are_refused_before_a_server_starts(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Field report 41: an export edited by hand to 2,048 positions, contexts of 4,096."""

    def start(*given: Any, **more: Any) -> None:
        raise AssertionError("a server starts")

    monkeypatch.setattr(stage.serving, "replicas", start)
    with artifact.claim(tmp_path, "drafter", "d") as folder:
        for name in ("1", "initial"):
            path = folder.path / "epochs" / name / "flat" / "config.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(FLAT | {"max_position_embeddings": 2048 if name == which else 4096}))
        drafter = folder.commit(version=1, recipe={}, inputs={}, content="d", files=[], counts={"best_epoch": "1"})
    prompts = Artifact(path="p", stage="prompts", key="k", content="c", parts={"traced": "t", "held_out": "h"})
    config = make_config(
        verifier={"max_model_len": 4096}, drafter={"keep_initial": True}, acceptance={"untrained": True}
    )
    with pytest.raises(InputError, match=rf"4096 tokens .*{which}/flat/config\.json: max_position_embeddings 2048"):
        stage.run(tmp_path / "work", config, prompts, drafter, silent)


def test_no_prompt_with_room_is_one_sentence() -> None:
    nothing = Measurement([[], []], 1.0, Counters())
    with pytest.raises(InputError, match=r"none of the 2 held-out prompts leaves room"):
        stage.summarize({"baseline": [nothing], "speculative": [nothing]}, "float32", 3)
