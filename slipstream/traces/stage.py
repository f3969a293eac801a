"""The traces stage: an ordered selection from the row pool as one Parquet file (columns: `table`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from slipstream import atomic, verifier
from slipstream.artifact import Artifact, claim, stage_key
from slipstream.config import RunConfig
from slipstream.digest import digest
from slipstream.progress import Report
from slipstream.serving import Endpoint
from slipstream.traces import origin, prompt_set, samples, sampling, splits, table
from slipstream.traces import report as page
from slipstream.traces.generate import Outcome, generate
from slipstream.traces.pool import TracePool, batches, open_pool
from slipstream.traces.prompts import Prompt
from slipstream.traces.rules import Rules
from slipstream.traces.selection import REJECTS, Selection
from slipstream.traces.states import States

STAGE, VERSION = "traces", 2
TRACED = (splits.TRAIN, splits.VALIDATION)
SUMMARY = page.SUMMARY
FILES = (table.FILE, REJECTS, SUMMARY, samples.FILE, page.FILE)  # of a traces artifact, whoever made it
Servers = Callable[[Path], AbstractContextManager[Sequence[Endpoint]]]


def _asked_of(config: RunConfig) -> dict[str, Any]:
    """Who answers: what the pool's rows have in common."""
    served = config.verifier
    own = not config.servers.traces_endpoints
    return {
        "verifier": verifier.identity(served),
        "dtype": served.dtype,
        "reasoning_parser": served.reasoning_parser,
        "tool_call_parser": served.tool_call_parser,
        "max_model_len": served.max_model_len,  # it cuts long answers and ends long conversations
        "extra_args": config.servers.extra_args if own else [],
    }


def _recipe(config: RunConfig) -> dict[str, Any]:
    return {**_asked_of(config), **config.traces.recipe()}


def key(config: RunConfig, prompts: Artifact) -> str:
    """The folder key for these prompts, or of the imported traces."""
    if config.traces.imported:
        return origin.imported(config).key
    return stage_key(STAGE, VERSION, _recipe(config), {"prompts": prompts.parts["traced"]})


def run(
    workdir: Path,
    config: RunConfig,
    prompts: Artifact,
    servers: Servers,
    report: Report,
    on_wait: Callable[[str], None] | None = None,
    states: States | None = None,
) -> Artifact:
    """Generates what is missing and writes the artifact; imported traces are taken as they are.

    `servers(log_folder)` is a context manager that gives endpoints; it is entered only when a trace is missing.
    `states` takes the hidden states that come with the answers.
    Raises StageFailed when a larger share than `traces.max_rejected_share` has no usable trace, when too many
    answers were cut or are not exact, and InputError when a server has other special tokens than the verifier.
    """
    if config.traces.imported:
        return origin.imported(config)
    recipe, inputs = _recipe(config), {"prompts": prompts.parts["traced"]}
    name = stage_key(STAGE, VERSION, recipe, inputs)
    with claim(workdir, STAGE, name, on_wait) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        with open_pool(workdir, digest(_asked_of(config))) as pool:
            missing = sum(1 for _ in _missing(prompts, config, pool))
            outcome = Outcome()
            if missing:
                with servers(folder.path / "logs") as endpoints:
                    outcome = generate(
                        partial(_missing, prompts, config, pool), missing, endpoints, config, pool, report, states
                    )
            rules = Rules.of(config)
            selection = Selection(config.traces, rules, folder.path)
            selection.write({split: prompt_set.load(prompts, split) for split in TRACED}, pool)
        execution = asdict(outcome) if missing else None
        figures = {**selection.summary.figures(), "splits": selection.rows, "execution": execution}
        show(folder.path, config, figures, selection.samples, rules)
        selection.check(outcome)
        total = sum(prompt_set.count(prompts, split) for split in TRACED)
        return folder.commit(
            version=VERSION,
            recipe=recipe,
            inputs=inputs,
            content=selection.content(),
            files=FILES,
            counts=selection.counts(),
            origin=origin.origin(config.verifier),
            work={
                "requested": outcome.requested,
                "reused": total - missing,
                "failed": outcome.failed,
                "retried": outcome.retried,
                "output_tokens_per_s": round(outcome.output_tokens / outcome.seconds, 1) if outcome.seconds else None,
                "server_limited_share": outcome.throughput.get("server_limited_share"),
                **({} if outcome.states is None else {"states": outcome.states}),
            },
        )


def show(folder: Path, config: RunConfig, figures: dict[str, Any], picked: samples.Chooser, rules: Rules) -> None:
    """Writes the artifact's summary, its sample rows as text, and the page that shows both."""
    atomic.write_json(folder / SUMMARY, figures)
    rendered = samples.rendered(picked.chosen(), rules, verifier.folder_of(config.verifier))
    atomic.write_json(folder / samples.FILE, rendered)
    page.write(folder)


def _traced(prompts: Artifact, longer_than: int = 0) -> Iterator[Prompt]:
    for split in TRACED:
        yield from prompt_set.load(prompts, split, longer_than)


def _missing(
    prompts: Artifact, config: RunConfig, pool: TracePool, longer_than: int = 0
) -> Iterator[tuple[str, Prompt, bool]]:
    """Row key, prompt, and whether it was begun, of every conversation that is not complete; memory for one batch."""
    for batch in batches(_traced(prompts, longer_than)):
        keys = {sampling.row_key(config.traces, prompt.key): prompt for prompt in batch}
        missing = pool.missing(list(keys))
        yield from ((key, keys[key], begun) for key, begun in missing.items())
