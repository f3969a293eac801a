"""The acceptance stage: servers with and without the drafter, measured in turn on the held-out prompts.

`acceptance.json` holds the figures, `outputs.parquet` every output of every server (key, kind, turn,
variant, token ids), so that a difference can be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream import atomic, serving, verifier
from slipstream.acceptance.counters import Counters
from slipstream.acceptance.served import Measurement, measure
from slipstream.acceptance.verdict import verdict
from slipstream.artifact import Artifact, checksum, claim, stage_key
from slipstream.config import RunConfig
from slipstream.drafter import checkpoints, described
from slipstream.drafter import stage as drafter_stage
from slipstream.drafter.shape import require_positions
from slipstream.errors import InputError
from slipstream.progress import Progress, Report
from slipstream.traces import prompt_set, splits
from slipstream.traces.prompts import Prompt

STAGE, VERSION = "acceptance", 2
BASELINE, SPECULATIVE, UNTRAINED = "baseline", "speculative", "untrained"
FIGURES = "acceptance.json"


def _recipe(config: RunConfig) -> dict[str, Any]:
    return {
        **config.acceptance.recipe(),
        "dtype": config.verifier.dtype,
        "max_model_len": config.verifier.max_model_len,
        "device": config.servers.device,
        "reasoning_parser": config.verifier.reasoning_parser,
        "tool_call_parser": config.verifier.tool_call_parser,
        "extra_args": config.servers.extra_args,
    }


def _inputs(config: RunConfig, prompts: Artifact, drafter: Artifact) -> dict[str, str]:
    return {
        "verifier": verifier.identity(config.verifier),
        "prompts": prompts.parts["held_out"],
        "drafter": drafter.content,
    }


def key(config: RunConfig, prompts: Artifact, drafter: Artifact) -> str:
    """The folder key for this drafter and these held-out prompts."""
    return stage_key(STAGE, VERSION, _recipe(config), _inputs(config, prompts, drafter))


def _variants(config: RunConfig, drafter: Artifact) -> dict[str, serving.ServerSpec]:
    """What is measured; raises InputError when the contexts go beyond a drafter's positions."""
    names = {SPECULATIVE: drafter.manifest().counts["best_epoch"]}
    if config.acceptance.untrained:
        names[UNTRAINED] = checkpoints.INITIAL
    variants = {BASELINE: serving.generation_server()}
    for variant, name in names.items():
        folder = drafter_stage.served_folder(drafter.folder, name)
        says = folder / drafter_stage.CONFIG
        require_positions(config.verifier.max_model_len, described.read(says).shape, str(says))
        variants[variant] = serving.speculative_server(folder, config.acceptance.draft_tokens)
    return variants


def _groups(config: RunConfig, variants: dict[str, serving.ServerSpec]) -> list[list[str]]:
    """Variants that run side by side: with and without the drafter, when the host has room for two."""
    names = list(variants)
    if config.servers.device == "cpu" or config.servers.replicas >= 2:
        return [names[:2], *([name] for name in names[2:])]
    return [[name] for name in names]


def run(
    workdir: Path,
    config: RunConfig,
    prompts: Artifact,
    drafter: Artifact,
    report: Report,
    on_wait: Callable[[str], None] | None = None,
) -> Artifact:
    """Measures; raises InputError without held-out prompts, or when contexts (`verifier.max_model_len`) go beyond the
    drafter's positions, ServerError when a server fails."""
    recipe, inputs = _recipe(config), _inputs(config, prompts, drafter)
    name = stage_key(STAGE, VERSION, recipe, inputs)
    with claim(workdir, STAGE, name, on_wait) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        variants = _variants(config, drafter)
        asked = list(prompt_set.load(prompts, splits.HELD_OUT))[: config.acceptance.max_prompts]
        if not asked:
            raise InputError("acceptance: no held-out prompts; raise prompts.held_out_ratio")
        measured: dict[str, list[Measurement]] = {}
        done_answers = 0
        total = len(asked) * config.acceptance.rounds * len(variants)

        def answered() -> None:
            nonlocal done_answers
            done_answers += 1
            report(Progress(done_answers, total, "answers"))

        for group in _groups(config, variants):
            specs = [variants[variant] for variant in group]
            logs, cache = folder.path / "logs", serving.cache_folder(config.servers, workdir)
            with serving.replicas(config.verifier, config.servers, specs, logs, cache) as endpoints:
                for _ in range(config.acceptance.rounds):
                    for variant, endpoint in zip(group, endpoints, strict=True):
                        one = measure(endpoint, asked, config.acceptance, config.verifier, answered)
                        measured.setdefault(variant, []).append(one)
        figures = summarize(measured, config.verifier.dtype, config.acceptance.draft_tokens)
        atomic.write_json(folder.path / FIGURES, figures)
        _write_outputs(folder.path / "outputs.parquet", asked, measured)
        return folder.commit(
            version=VERSION,
            recipe=recipe,
            inputs=inputs,
            content=checksum(folder.path / FIGURES),
            files=[FIGURES, "outputs.parquet"],
            counts={
                "prompts": len(asked),
                "kinds": len({prompt.kind for prompt in asked}),
                "verdict": figures["verdict"],
            },
        )


def _total(measurements: Sequence[Measurement]) -> Counters:
    drafts, tokens, accepted = 0.0, 0.0, 0.0
    positions: dict[int, float] = {}
    for measurement in measurements:
        counters = measurement.counters
        drafts, tokens = drafts + counters.drafts, tokens + counters.draft_tokens
        accepted += counters.accepted
        for position, value in counters.per_position.items():
            positions[position] = positions.get(position, 0.0) + value
    return Counters(drafts, tokens, accepted, positions)


def _speed(measurements: Sequence[Measurement]) -> float:
    return sum(m.output_tokens for m in measurements) / sum(m.seconds for m in measurements)


def summarize(measured: dict[str, list[Measurement]], dtype: str, draft_tokens: int) -> dict[str, Any]:
    """The figures of `acceptance.json` from the measurements by variant (rounds in order)."""
    if not measured[BASELINE][0].output_tokens:
        raise InputError(
            f"acceptance: none of the {len(measured[BASELINE][0].conversations)} held-out prompts leaves room for an "
            "answer; raise verifier.max_model_len"
        )
    counters = _total(measured[SPECULATIVE])
    speeds = {variant: _speed(rounds) for variant, rounds in measured.items()}
    passes = [
        [[trace.output_ids for trace in turns] for turns in m.conversations]
        for m in (*measured[BASELINE], *measured[SPECULATIVE])
    ]
    by_prompt = zip(*passes, strict=True)
    different = sum(any(output != outputs[0] for output in outputs) for outputs in by_prompt)
    figures: dict[str, Any] = {
        "dtype": dtype,
        "draft_tokens": draft_tokens,
        "prompts": len(passes[0]),
        "prompts_without_room": sum(not turns for turns in passes[0]),
        "output_tokens": measured[BASELINE][0].output_tokens,
        "acceptance_rate": counters.acceptance_rate,
        "mean_accepted_length": counters.mean_accepted_length,
        "acceptance_per_position": counters.rate_per_position,
        "tokens_per_second": {variant: round(speed, 2) for variant, speed in speeds.items()},
        "speed_up": speeds[SPECULATIVE] / speeds[BASELINE],
        "speed_up_per_round": [
            _speed([fast]) / _speed([slow])
            for fast, slow in zip(measured[SPECULATIVE], measured[BASELINE], strict=True)
        ],
        "outputs_identical": different == 0,
        "outputs_different": different,
    }
    if UNTRAINED in measured:
        floor = _total(measured[UNTRAINED])
        figures["untrained"] = {
            "acceptance_rate": floor.acceptance_rate,
            "mean_accepted_length": floor.mean_accepted_length,
            "acceptance_per_position": floor.rate_per_position,
        }
    figures["verdict"], figures["reason"] = verdict(figures)
    return figures


def _write_outputs(path: Path, prompts: Sequence[Prompt], measured: dict[str, list[Measurement]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "key": prompt.key,
            "kind": prompt.kind,
            "turn": trace.turn,
            "variant": variant,
            "finish_reason": trace.finish_reason,
            "output_ids": list(trace.output_ids),
            "answer": trace.answer,
        }
        for variant, rounds in measured.items()
        for prompt, turns in zip(prompts, rounds[0].conversations, strict=True)
        for trace in turns
    ]
    with atomic.replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows), temporary, compression="zstd")
