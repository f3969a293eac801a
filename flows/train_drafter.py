"""From prompts to a verdict: traces, features, vocabulary, drafter, acceptance."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow
from prefect.runtime import flow_run

from flows.capture_features import capture_features
from slipstream import servers_ahead
from slipstream.config import RunConfig
from slipstream.plan import preflight
from tasks.acceptance import measure_acceptance
from tasks.drafter import train
from tasks.features import begin_reference
from tasks.prompts import split_prompts
from tasks.report import write_report
from tasks.traces import generate_traces
from tasks.vocabulary import choose_vocabulary


def _run_name() -> str:
    config = flow_run.parameters["config"]
    return str(config["name"] if isinstance(config, dict) else config.name)


@flow(
    name="train-drafter",
    flow_run_name=_run_name,
    persist_result=False,  # a completed run with a stored result could not be run again
)
def train_drafter(config: RunConfig) -> None:
    """Train an EAGLE-3 drafter for a verifier and measure on vLLM how much faster it decodes.

    A stage that is finished and intact is reused, whichever run made it; a failed run that is retried
    continues inside the stage that failed.

    Args:
        config: Everything the run needs; deployments/*.yaml hold complete ones.
    """
    started = datetime.now(UTC)
    preflight(config)
    with servers_ahead.closing():
        prompts = split_prompts(config)
        begin_reference(config)
        traces = generate_traces(config, prompts)
        features, shards = capture_features(config, traces.path)
        vocabulary = choose_vocabulary(config, traces)
        drafter = train(config, features, vocabulary)
        acceptance = measure_acceptance(config, prompts, drafter)
    stages = {a.stage: a for a in (prompts, traces, features, vocabulary, drafter, acceptance)}
    write_report(config, started, stages, shards)
