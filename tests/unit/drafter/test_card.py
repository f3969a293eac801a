"""The model card: valid front matter, every figure that is known, commands that work, no markup of others."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from slipstream import serving
from slipstream.config import RunConfig
from slipstream.drafter import card, opened
from tests.unit.drafter import tiny

FACTS: dict[str, Any] = {
    "run": "mine",
    "verifier": {"name": "Kimi", "identity": "0123abcd", "model_type": "kimi_k25", "num_layers": 6, "license": "mit"},
    "data": {
        "sources": [{"name": "code.jsonl", "weight": 0.5, "used": 7000}],
        "sampling": [{"temperature": 0.6}, {}],
        "train": 9000,
        "validation": 1000,
        "tokens": 14400000,
        "max_tokens": 6144,
    },
    "mapping": {"forced": 20, "coverage_train": 0.99, "coverage_validation": 0.9712},
    "training": {"epochs": 5, "learning_rate": 3e-5, "loss": "kl_div", "init_from": "published-drafter"},
    "serve": {
        "arguments": ["--dtype", "bfloat16", "--tensor-parallel-size", "8"],
        "draft_tokens": 4,
        "dtype": "bfloat16",
    },
    "epoch": {
        "name": "3",
        "step": 1460,
        "replay": {"accepted_length": 3.05, "acceptance_per_position": [0.83, 0.67], "drafts": 5000},
        "validation": {"loss_epoch": 0.967},
    },
    "served": {"mean_accepted_length": 2.98, "speed_up": 1.6, "verdict": "accepted", "reason": "1.60x the speed"},
}


@pytest.fixture
def drafter(tmp_path: Path) -> opened.Opened:
    """A drafter for a verifier in a folder called Kimi."""
    return opened.read(tiny.save(tmp_path / "drafter"))


def test_front_matter_is_what_the_hub_reads(drafter: opened.Opened) -> None:
    data = ModelCard(card.render(drafter, "flat", FACTS, "org/kimi-eagle3")).data
    assert (data.library_name, data.license) == ("vllm", "mit")
    assert data.base_model is None  # a folder's name is no repository, and the Hub would refuse the card
    assert {"eagle3", "speculative-decoding"} <= set(data.tags)
    assert ModelCard(card.render(drafter, "speculators", FACTS, "n")).data.library_name == "speculators"
    assert ModelCard(card.render(drafter, "flat", {}, "n")).data.license is None


@pytest.mark.parametrize(
    "row",
    [
        "| accepted length, offline replay of validation rows | 3.05 |",
        "| acceptance per position, offline replay | 0.83, 0.67 |",
        "| accepted length, served by vLLM on held-out prompts | 2.98 |",
        "| verdict | accepted: 1.60x the speed |",
        "| identity (digest of configuration, tokenizer and weights) | 0123abcd |",
        "| prompts | code.jsonl (weight 0.5, used 7,000) |",
        "| sampling | temperature 0.6 |",
        "| sampling | greedy |",
        "| tokens | 14,400,000 |",
        "| draft tokens | 4 |",
        "| coverage of supervised tokens, validation rows | 0.9712 |",
        "| head_dim | 4 |",
        "| rope | rope_type default, rope_theta 50000 |",
        "| auxiliary layer ids (state before the layer) | 2, 3, 5 |",
        "| norm_output | no |",
        "| epoch (from 0) | 3 |",
        "| steps | 1,460 |",
        "| warm start | published-drafter |",
        "| learning_rate | 3e-05 |",
    ],
)
def test_every_figure_that_is_known_stands_there(drafter: opened.Opened, row: str) -> None:
    assert row in card.render(drafter, "flat", FACTS, "name").splitlines()


def test_what_is_not_known_is_left_out(drafter: opened.Opened) -> None:
    shown = card.render(drafter, "flat", {}, "name")
    assert "## Shape" in shown
    for section in ("## Acceptance", "## Data", "## Training", "None"):
        assert section not in shown


def test_the_vllm_command_is_the_one_that_acceptance_serves_with(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Word for word what `serving.command` starts for the measurement, but the interpreter, names and address."""
    config = make_config(
        verifier={"tool_call_parser": "kimi_k2", "path": "/models/Kimi"}, acceptance={"draft_tokens": 5}
    )
    (tmp_path / "python").touch()
    servers = config.servers.model_copy(update={"python": str(tmp_path / "python")})
    spec = serving.speculative_server(Path("org/drafter"), 5)
    started = serving.command(config.verifier, servers, spec, 8123)
    serve = {
        "arguments": serving.arguments(config.verifier, servers, serving.ServerSpec("speculative")),
        "draft_tokens": 5,
    }
    shown = shlex.split(card.vllm_command("Kimi", "org/drafter", serve))
    assert shown[:5] == ["python", *started[1:4], "Kimi"]
    address = ["--model", "/models/Kimi", "--host", "127.0.0.1", "--port", "8123"]
    assert started[3:9] == address
    assert shown[5:] == started[9:]
    assert json.loads(shown[-1]) == {"method": "eagle3", "model": "org/drafter", "num_speculative_tokens": 5}


def test_the_sglang_command_drafts_as_many_tokens(drafter: opened.Opened) -> None:
    """SGLang counts the verifier's own token among --speculative-num-draft-tokens (docs, speculative decoding)."""
    line = shlex.split(card.sglang_command("Kimi", "org/drafter", FACTS["serve"]))
    options = dict(pairwise(line))
    assert options["--speculative-algorithm"] == "EAGLE3"
    assert options["--speculative-draft-model-path"] == "org/drafter"
    assert (options["--speculative-num-steps"], options["--speculative-num-draft-tokens"]) == ("4", "5")


def test_an_engine_that_cannot_load_it_is_told_by_name(tmp_path: Path, drafter: opened.Opened) -> None:
    assert "SGLang: not in this form, it loads the flat form only" in card.render(drafter, "speculators", FACTS, "n")
    normed = opened.read(tiny.save(tmp_path / "n", tiny.config(norm_before_residual=True)))
    shown = card.render(normed, "flat", FACTS, "n")
    assert "SGLang: not in this form, its loader does not read norm_before_residual" in shown
    assert "api_server --model Kimi " in shown


def test_a_verifier_whose_layers_sglang_counts_otherwise(tmp_path: Path) -> None:
    named = {
        **tiny.CONFIG["speculators_config"],
        "verifier": {"name_or_path": "Q", "architectures": ["Qwen3ForCausalLM"]},
    }
    qwen = opened.read(tiny.save(tmp_path / "q", tiny.config(speculators_config=named)))
    assert "--engine sglang" in card.render(qwen, "flat", FACTS, "n")
    assert "sglang.launch_server" in card.render(qwen, "flat", {**FACTS, "engine": "sglang"}, "n")


def test_names_of_others_are_text(drafter: opened.Opened) -> None:
    evil = "<img src=x> | `x` [a](b)"
    facts = {**FACTS, "data": {"sources": [{"name": evil}]}, "verifier": {"license": "a: b\n---\n# x"}}
    shown = card.render(drafter, "flat", facts, "n```\nrm -rf")
    assert "<img" not in shown
    assert "| prompts | &lt;img src=x&gt; \\| \\`x\\` \\[a\\](b) |" in shown
    assert ModelCard(shown).data.license == "a: b\n---\n# x"
