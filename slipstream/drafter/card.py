"""The model card of an exported drafter: README.md with Hugging Face front matter.

It says what is known: of an external checkpoint its shape and how to serve it, of our own also data, mapping, training
and acceptance.  Names that people gave are escaped, and paths of this machine never stand in it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from slipstream import serving
from slipstream.drafter import checkpoints, engines
from slipstream.drafter.opened import EMBEDDING, Opened
from slipstream.traces.report import cell, fenced

MODEL_ID = re.compile(r"[\w.-]+/[\w.-]+")  # the Hub refuses a card whose base_model is no repository
TAGS = ["eagle3", "speculative-decoding", "draft-model", "slipstream"]
Rows = Iterable[tuple[str, Any]]


def epoch_facts(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint folder says of its epoch: name, step, replay figures, validation metrics."""
    return {
        "name": checkpoint.name,
        "step": _json(checkpoint / checkpoints.STATE).get("global_step"),
        "replay": _json(checkpoint / checkpoints.REPLAY),
        "validation": _json(checkpoint / checkpoints.METRICS),
    }


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return found


def verifier_name(drafter: Opened, facts: Mapping[str, Any]) -> str:
    """The verifier as a name: the model on the Hub, or the last part of a folder's path."""
    named = (drafter.config.get("speculators_config") or {}).get("verifier") or {}
    name = str(named.get("name_or_path") or facts.get("verifier", {}).get("name") or "VERIFIER")
    return Path(name).name if Path(name).is_absolute() else name


def render(drafter: Opened, form: engines.Form, facts: Mapping[str, Any], name: str) -> str:
    """The card of a drafter in `form`; `name` is how commands call its folder or repository.

    `facts`: `about.about`'s sections, `epoch` (`epoch_facts`) and `served` (acceptance.json), as far as they are known.
    """
    base = verifier_name(drafter, facts)
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(base, form, facts), sort_keys=False)}---",
        f"# EAGLE-3 drafter for {cell(base)}",
        "A draft model for speculative decoding, made with Slipstream: it proposes tokens that the verifier accepts or "
        f"rejects, so that the output stays the verifier's. This is its {form} form.",
        "## Serve",
        *_serve(drafter, form, facts, base, name),
        *_section("Acceptance", _acceptance(facts)),
        *_section("Verifier", _verifier(base, facts)),
        *_section("Data", _data(facts)),
        *_section("Draft vocabulary", _mapping(drafter, facts)),
        *_section("Shape", _shape(drafter)),
        *_section("Training", _training(facts)),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(base: str, form: engines.Form, facts: Mapping[str, Any]) -> dict[str, Any]:
    license_ = facts.get("verifier", {}).get("license")
    return {
        **({"base_model": base} if MODEL_ID.fullmatch(base) else {}),
        "library_name": "speculators" if form == "speculators" else "vllm",
        "pipeline_tag": "text-generation",
        "tags": TAGS,
        **({"license": license_} if license_ else {}),
    }


def _section(title: str, rows: Rows) -> list[str]:
    lines = [f"| {cell(name)} | {cell(_text(value))} |" for name, value in rows if value not in (None, "", {}, [])]
    return [f"## {title}", "\n".join(["| | |", "|---|---|", *lines])] if lines else []


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_text, value))
    return str(value)


def vllm_command(base: str, name: str, serve: Mapping[str, Any]) -> str:
    """The command that serves a verifier with a drafter on vLLM; `serve` is `about.about`'s section."""
    spec = serving.speculative_server(Path(name), serve.get("draft_tokens", 3))
    return shlex.join(["python", *serving.LAUNCH, "--model", base, *serve.get("arguments", []), *spec.args])


def sglang_command(base: str, name: str, serve: Mapping[str, Any]) -> str:
    """The command that serves a verifier with a drafter on SGLang, as a chain of the same length."""
    steps = serve.get("draft_tokens", 3)
    line = ["python", "-m", "sglang.launch_server", "--model-path", base, "--speculative-algorithm", "EAGLE3"]
    line += ["--speculative-draft-model-path", name, "--speculative-num-steps", str(steps)]
    line += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1)]
    line += ["--tp", str(serve.get("tensor_parallel", 1))]
    return shlex.join([*line, *(["--dtype", serve["dtype"]] if "dtype" in serve else [])])


def _serve(drafter: Opened, form: engines.Form, facts: Mapping[str, Any], base: str, name: str) -> list[str]:
    serve = facts.get("serve", {})
    written = facts.get("engine")
    shown = []
    if EMBEDDING not in drafter.tensors:
        shown.append("It has no embedding of its own: servers share the verifier's (vLLM: not across pipeline stages).")
    for engine, command in (("vLLM", vllm_command), ("SGLang", sglang_command)):
        reason = engines.refusal(drafter.config, form, "vllm" if engine == "vLLM" else "sglang")
        if reason is not None:
            shown.append(f"{engine}: not in this form, {cell(reason)}.")
            continue
        if engine == "SGLang" and written != "sglang" and (why := engines.needs_sglang_export(drafter.config)):
            shown.append(f"SGLang: export it with `slipstream export --engine sglang`: {why}.")
            continue
        shown.append(f"{engine}:\n\n{fenced(command(base, name, serve), 'sh')}")
    return shown


def _acceptance(facts: Mapping[str, Any]) -> Rows:
    replay, served = facts.get("epoch", {}).get("replay") or {}, facts.get("served") or {}
    yield "accepted length, offline replay of validation rows", replay.get("accepted_length")
    yield "acceptance per position, offline replay", replay.get("acceptance_per_position")
    yield "drafts replayed", replay.get("drafts")
    yield "accepted length, served by vLLM on held-out prompts", served.get("mean_accepted_length")
    yield "acceptance per position, served", served.get("acceptance_per_position")
    yield "draft tokens a step", served.get("draft_tokens")
    yield "held-out prompts", served.get("prompts")
    yield "speed against the same server without it", served.get("speed_up")
    yield "outputs identical to the server without it", served.get("outputs_identical")
    yield "verdict", served.get("verdict") and f"{served['verdict']}: {served['reason']}"


def _verifier(base: str, facts: Mapping[str, Any]) -> Rows:
    known = facts.get("verifier", {})
    yield "name", base
    yield "type", known.get("model_type")
    yield "layers", known.get("num_layers")
    yield "hidden size", known.get("hidden_size")
    yield "identity (digest of configuration, tokenizer and weights)", known.get("identity")


def _data(facts: Mapping[str, Any]) -> Rows:
    data = facts.get("data", {})
    if data.get("imported"):
        yield "traces", "imported from an existing store"
    else:
        for source in data.get("sources", []):
            rest = {key: value for key, value in source.items() if key != "name"}
            yield "prompts", f"{source['name']} ({_text(rest)})" if _text(rest) else source["name"]
        for way in data.get("sampling", []):
            yield "sampling", _text(way) or "greedy"
        yield "longest answer, tokens", data.get("max_tokens")
    yield "training rows", data.get("train")
    yield "validation rows", data.get("validation")
    yield "tokens", data.get("tokens")


def _mapping(drafter: Opened, facts: Mapping[str, Any]) -> Rows:
    known = facts.get("mapping", {})
    yield "draft tokens", drafter.config["draft_vocab_size"]
    yield "verifier's tokens", drafter.config["transformer_layer_config"]["vocab_size"]
    yield "tokens that are in whatever their frequency", known.get("forced")
    yield "coverage of supervised tokens, training rows", known.get("coverage_train")
    yield "coverage of supervised tokens, validation rows", known.get("coverage_validation")


def _shape(drafter: Opened) -> Rows:
    layer, config = drafter.config["transformer_layer_config"], drafter.config
    for name in (
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "rms_norm_eps", "max_position_embeddings"),
    ):
        yield name, layer[name]
    yield "rope", layer["rope_parameters"]
    yield "auxiliary layer ids (state before the layer)", ", ".join(map(str, drafter.aux_ids))
    for flag in engines.NORM_FLAGS:
        yield flag, bool(config.get(flag))


def _training(facts: Mapping[str, Any]) -> Rows:
    epoch, training = facts.get("epoch", {}), facts.get("training", {})
    yield "epoch (from 0)", epoch.get("name")
    yield "steps", epoch.get("step")
    yield "warm start", training.get("init_from")
    yield "validation", epoch.get("validation")
    yield from ((name, value) for name, value in training.items() if name != "init_from")
