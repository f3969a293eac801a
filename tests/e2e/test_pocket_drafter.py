"""What the trained pocket drafter is worth by three ways: vLLM on each exported form, and the replay without a server.

The prompts are the validation ones.  Their traces were greedy in float32, so the servers repeat them token for token,
and the states that the replay reads are those of the very answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import serving
from slipstream.acceptance.replay import Replay, replay
from slipstream.acceptance.served import Measurement, measure
from slipstream.artifact import open_artifact
from slipstream.config import RunConfig, load_config
from slipstream.drafter import build, loaders, replay_rows
from slipstream.drafter.job import Job
from slipstream.traces import prompt_set, splits, table
from tests.conftest import ROOT, Run

pytestmark = [pytest.mark.serve, pytest.mark.pocket, pytest.mark.timeout(2400)]
TOKENS = 3
TOLERANCE = 0.02  # of a rate per position


@pytest.fixture(scope="module")
def config() -> RunConfig:
    """The run's."""
    return load_config(ROOT / "deployments/pocket.yaml")


@pytest.fixture(scope="module")
def drafter(pocket_run: Run) -> Path:
    """The drafter's folder."""
    return (pocket_run.workdir / "runs/latest/drafter").resolve()


@pytest.fixture(scope="module")
def best(drafter: Path) -> str:
    """The best epoch."""
    counts = open_artifact(drafter).manifest().counts
    return str(counts["best_epoch"])


@pytest.fixture(scope="module")
def served(
    pocket_run: Run, config: RunConfig, drafter: Path, best: str, tmp_path_factory: pytest.TempPathFactory
) -> list[Measurement]:
    """The validation prompts on a server with the flat form and on one with speculators' form, side by side."""
    prompts = list(prompt_set.load(open_artifact(pocket_run.workdir / "runs/latest/prompts"), splits.VALIDATION))
    forms = [drafter / "epochs" / best / form for form in ("flat", "speculators")]
    specs = [serving.speculative_server(form, TOKENS) for form in forms]
    logs, cache = tmp_path_factory.mktemp("logs"), pocket_run.workdir / "cache"
    with serving.replicas(config.verifier, config.servers, specs, logs, cache) as endpoints:
        return [measure(endpoint, prompts, config.acceptance, config.verifier, lambda: None) for endpoint in endpoints]


@pytest.fixture(scope="module")
def job(drafter: Path) -> Job:
    """The training that made it."""
    return Job.load(drafter / "job.json")


@pytest.fixture(scope="module")
def model(job: Job, drafter: Path, best: str) -> Any:
    """The drafter as the trainer left it, from its checkpoint."""
    model = build.build(job, "cpu").eval()
    kept = model.load_state_dict(load_file(drafter / "checkpoints" / best / "model.safetensors"), strict=False)
    assert (sorted(kept.missing_keys), kept.unexpected_keys) == (
        ["verifier_lm_head.weight", "verifier_norm.weight"],
        [],
    )
    return model


@pytest.fixture(scope="module")
def batches(job: Job) -> list[dict[str, Any]]:
    """The captured states of the validation rows."""
    validation = loaders.loaders(job, len(job.layer_ids), torch.float32)[1]
    return list(replay_rows.loader(validation, job, 0, 1))


@pytest.fixture(scope="module")
def replayed(model: Any, batches: list[dict[str, Any]]) -> Replay:
    """The replay of the checkpoint."""
    return replay(model, batches, TOKENS)


def _apart(mine: list[float], its: list[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(mine, its, strict=True)]


def test_both_forms_of_the_same_weights_are_accepted_alike(served: list[Measurement]) -> None:
    """To the count: in float32 with greedy decoding nothing differs between the two servers."""
    flat, speculators = served
    assert flat.counters.drafts > 1000
    assert flat.counters == speculators.counters
    assert [[trace.output_ids for trace in turns] for turns in flat.conversations] == [
        [trace.output_ids for trace in turns] for turns in speculators.conversations
    ]


def test_the_servers_answer_what_was_traced(served: list[Measurement], pocket_run: Run) -> None:
    traced = {
        row["key"]: tuple(row["input_ids"][row["prompt_tokens"] :])
        for row in table.read(
            open_artifact(pocket_run.workdir / "runs/latest/traces"), ["key", "split", "prompt_tokens", "input_ids"]
        )
        if row["split"] == splits.VALIDATION
    }
    assert {turns[0].key: tuple(turns[0].output_ids) for turns in served[0].conversations} == traced


def test_the_replay_of_the_checkpoint_agrees_with_the_server(served: list[Measurement], replayed: Replay) -> None:
    """In two runs: 1,466 drafts both ways, accepted 1,228, 995, 826 replayed and 1,228, 995, 829 served; 1,451, and
    1,236, 1,003, 821 replayed and 1,236, 1,003, 823 served.

    What is missing at the third position lies two tokens behind an answer's end, where no state was captured.
    """
    counters = served[0].counters
    assert max(_apart(replayed.rates, counters.rate_per_position)) < TOLERANCE
    assert replayed.drafts == pytest.approx(counters.drafts, rel=0.005)
    assert replayed.accepted_length == pytest.approx(counters.mean_accepted_length, abs=TOLERANCE)


def test_the_trainer_replayed_the_same(replayed: Replay, drafter: Path, best: str, pocket_run: Run) -> None:
    found = json.loads((drafter / "checkpoints" / best / "replay.json").read_bytes())
    assert found["drafts"] == replayed.drafts
    assert found["acceptance_per_position"] == pytest.approx(replayed.rates, abs=1e-9)
    counts = open_artifact(drafter).manifest().counts
    assert (
        counts["accepted_length"][best] == round(replayed.accepted_length, 4) == max(counts["accepted_length"].values())
    )
    assert (found["coverage"], found["accuracy_all"]) == (replayed.coverage, replayed.accuracy)


def test_teacher_forcing_is_further_from_the_server(
    served: list[Measurement], replayed: Replay, drafter: Path, best: str
) -> None:
    """speculators' accuracies of whole chains: 0.829, 0.677, 0.553 over all tokens; served are 0.838, 0.679, 0.565."""
    metrics = json.loads((drafter / "checkpoints" / best / "val_metrics.json").read_bytes())
    naive = [metrics[f"full_acc_{position}_epoch"] for position in range(TOKENS)]
    rates = served[0].counters.rate_per_position
    assert max(_apart(naive, rates)) > 2 * max(_apart(replayed.rates, rates))


@pytest.fixture
def other_convention(model: Any) -> Iterator[Any]:
    """The same weights, the normed state fed back."""
    model.config.norm_output = True
    yield model
    model.config.norm_output = False


def test_a_wrong_convention_misses_the_tolerance(
    served: list[Measurement], other_convention: Any, batches: list[dict[str, Any]]
) -> None:
    """0.874, 0.566, 0.281 as measured, with the state behind the norm fed back; the first token needs none."""
    wrong = replay(other_convention, batches, TOKENS)
    assert min(_apart(wrong.rates, served[0].counters.rate_per_position)[1:]) > TOLERANCE


def test_states_of_the_place_before_miss_the_tolerance(
    served: list[Measurement], model: Any, batches: list[dict[str, Any]]
) -> None:
    """0.491, 0.296, 0.145 as measured."""
    late = [{**batch, "hidden_states": batch["hidden_states"].roll(1, dims=1)} for batch in batches]
    assert min(_apart(replay(model, late, TOKENS).rates, served[0].counters.rate_per_position)) > TOLERANCE
