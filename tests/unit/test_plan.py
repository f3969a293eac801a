"""What a run will cost: the reference job's own figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import pytest
from safetensors import safe_open

from slipstream import plan as planning
from slipstream.config import RunConfig, load_config
from slipstream.errors import InputError
from slipstream.features.recipe import open_pool
from slipstream.plan import plan


@pytest.fixture
def kimi(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunConfig:
    """The reference job, on a machine that has neither its verifier nor its prompts."""
    monkeypatch.chdir(tmp_path)
    return load_config(root / "deployments" / "kimi-k2.5-8gpu.yaml").model_copy(update={"workdir": str(tmp_path)})


def test_the_reference_job(kimi: RunConfig) -> None:
    estimate = plan(kimi)
    assert estimate["bytes_per_token"] == 57_344
    assert estimate["tokens"] == pytest.approx(14.44e6, rel=0.01)
    assert estimate["feature_store_bytes"] == pytest.approx(828e9, rel=0.01)
    assert estimate["layer_ids"] == [2, 30, 58, 61]
    assert estimate["hours"]["traces"] == pytest.approx(5.3, rel=0.01)
    assert estimate["drafter_parameters"]["trained"] == pytest.approx(1190.9e6, rel=1e-4)
    assert "published" in estimate["verifier"]


def test_the_drafter_total_adds_embedding_and_draft_head(kimi: RunConfig) -> None:
    parameters = plan(kimi)["drafter_parameters"]
    assert parameters["total"] - parameters["trained"] == 163_840 * 7168  # the head is trained
    frozen = kimi.drafter.model_copy(update={"train_lm_head": False})
    less = plan(kimi.model_copy(update={"drafter": frozen}))["drafter_parameters"]
    assert (less["total"], parameters["trained"] - less["trained"]) == (parameters["total"], 32_000 * 7168)


def test_the_trained_parameters_are_those_of_a_built_drafter(make_config: Callable[..., RunConfig]) -> None:
    """Counted by hand for hidden 128, 4 heads of 32, MLP 256 and three auxiliary layers."""
    h, q, mlp = 128, 4 * 32, 256
    fc = 3 * h * h
    attention = 3 * (2 * h * q) + q * h  # q, k, v read embedding and state side by side
    norms = 3 * h + h  # input, hidden, post-attention; and the last one
    write = make_config(prompts={"expected_prompts": 10})
    assert plan(write)["drafter_parameters"]["trained"] == fc + attention + 3 * h * mlp + norms


@pytest.mark.parametrize(
    ("changes", "kept", "inside", "initial", "exported"),
    [
        ({"epochs": 5}, 3, 1, 0, 5),  # best, last, and the one being written
        ({"epochs": 5, "keep_checkpoints": "all", "keep_initial": True}, 5, 1, 1, 6),
        ({"epochs": 1}, 1, 1, 0, 1),
        ({"epochs": 0}, 0, 0, 1, 1),
    ],
)
def test_disk_of_a_drafter_is_what_retention_leaves_and_the_exports(
    kimi: RunConfig, changes: dict[str, Any], kept: int, inside: int, initial: int, exported: int
) -> None:
    """Kimi-K2.5: 2,365.3 M parameters with head and embedding, of them 1,190.9 M trained; exports in bfloat16."""
    settings = {"keep_initial": False, "keep_checkpoints": "best_and_last", "export_embeddings": True} | changes
    drafter = kimi.drafter.model_copy(update=settings)
    estimate = plan(kimi.model_copy(update={"drafter": drafter}))
    trained, total = 1190.9e6, 1190.9e6 + 163_840 * 7168
    whole, step = 4 * total + 8 * trained, 12 * trained
    wanted = kept * whole + inside * step + initial * 4 * total + exported * 4 * total
    assert estimate["checkpoint_bytes"] == pytest.approx(wanted, rel=1e-4)
    bare = plan(kimi.model_copy(update={"drafter": drafter.model_copy(update={"export_embeddings": False})}))
    assert estimate["checkpoint_bytes"] - bare["checkpoint_bytes"] == exported * 2 * 163_840 * 7168


def test_what_a_training_has_written_needs_no_more_room(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that failed late in training goes on on the disk that it has filled."""
    wanted = {"prompts": {"expected_prompts": 1}, "features": {"disk_reserve_gib": 0}}
    config = make_config(**wanted)
    estimate = plan(config)
    whole = estimate["checkpoint_bytes"]
    monkeypatch.setattr(planning, "free_bytes", lambda path: estimate["feature_store_bytes"] * 2 + whole // 2)
    assert not plan(config)["fits"]
    folder = config.root / "drafter" / "key"
    (folder / "checkpoints" / "0").mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"drafter": config.drafter.model_dump(mode="json")}))
    with (folder / "checkpoints" / "0" / "model.safetensors").open("wb") as file:
        file.truncate(whole * 2 // 3)
    assert plan(config)["fits"]
    assert not plan(make_config(**wanted, drafter={"seed": 1}))["fits"]
    (folder / "manifest.json").touch()
    assert not plan(config)["fits"]  # finished: the next one is of other features


def test_it_does_not_fit_without_disk_or_gpus(kimi: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "free_bytes", lambda path: 10**9)
    monkeypatch.setattr(planning, "gpus_here", lambda: 1)
    estimate = plan(kimi)
    assert not estimate["fits"]
    assert "1.0 GB free" in estimate["reasons"][0]
    assert estimate["reasons"][1] == "8 GPUs needed, 1 here"


def test_it_fits_with_both(kimi: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "free_bytes", lambda path: 10**13)
    monkeypatch.setattr(planning, "gpus_here", lambda: 8)
    assert (plan(kimi)["fits"], plan(kimi)["reasons"]) == (True, [])


def test_what_the_pool_holds_needs_no_more_room(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that failed in training goes on, though the disk would not hold its store a second time."""
    config = make_config(prompts={"expected_prompts": 1000}, features={"disk_reserve_gib": 0})
    estimate = plan(config)
    checkpoints, store = estimate["checkpoint_bytes"], estimate["feature_store_bytes"]
    free = int(checkpoints * (1 + planning.RESERVE)) + store // 2
    monkeypatch.setattr(planning, "free_bytes", lambda path: free)
    assert not plan(config)["fits"]
    with closing(open_pool(config.root, config)) as pool:
        for i, share in enumerate((2, 4)):
            path = pool.path(f"{i}0" * 16)
            path.parent.mkdir()
            with path.open("wb") as file:
                file.truncate(store // share)
    assert plan(config)["fits"]


def test_prompts_are_counted_when_they_are_there(
    make_config: Callable[..., RunConfig], write_prompts: Callable[..., str]
) -> None:
    source = write_prompts([f"prompt {i}" for i in range(50)] + ["prompt 0"])
    estimate = plan(make_config(prompts={"sources": [{"path": source}], "held_out_ratio": 0.2}))
    assert (estimate["prompts"], estimate["traced_prompts"]) == (50, 40)
    assert plan(make_config(prompts={"sources": [{"path": source}], "limit": 10}))["prompts"] == 10


def test_weights_and_limit_count_as_in_the_run(
    make_config: Callable[..., RunConfig], write_prompts: Callable[..., str]
) -> None:
    code, math = write_prompts([f"c {i}" for i in range(45)], "c.jsonl"), write_prompts([*"abcdefgh", "c 0"], "m.jsonl")
    sources = [{"path": code, "weight": 3}, {"path": math, "weight": 1}]
    mixed = {"sources": sources, "held_out_ratio": 0.25}
    estimate = plan(make_config(prompts=mixed))
    assert (estimate["prompts"], estimate["traced_prompts"]) == (32, 24)  # 8 are a quarter
    assert plan(make_config(prompts=mixed | {"limit": 20}))["prompts"] == 20
    plain = [{"path": code}, {"path": math}]
    assert plan(make_config(prompts={"sources": plain}))["prompts"] == 53


def test_planning_downloads_nothing(make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*given: Any, **more: Any) -> None:
        raise AssertionError("asked the Hub")

    monkeypatch.setattr(datasets, "load_dataset", download)
    wanted = {"sources": [{"path": "org/data"}], "expected_prompts": 9}
    assert plan(make_config(prompts=wanted))["prompts"] == 9


def test_a_data_set_of_the_hub_is_counted_when_nothing_is_expected(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = datasets.Dataset.from_list([{"prompt": f"p {i}"} for i in range(30)])
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **more: rows)
    assert plan(make_config(prompts={"sources": [{"path": "org/data"}]}))["prompts"] == 30


def test_the_pocket_verifier_is_counted_from_its_own_weights(make_config: Callable[..., RunConfig], root: Path) -> None:
    estimate = plan(make_config(prompts={"expected_prompts": 10}))
    weights = next((root / "slipstream" / "pocket" / "verifier").glob("*.safetensors"))
    with safe_open(weights, framework="numpy") as file:
        vocab, hidden = file.get_slice("language_model.model.embed_tokens.weight").get_shape()
    assert estimate["bytes_per_token"] == 4 * hidden * 4
    assert estimate["drafter_parameters"]["total"] - estimate["drafter_parameters"]["trained"] == (vocab + 320) * hidden


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, r"prompts\.jsonl.*expected_prompts"),
        ({"prompts": {"expected_prompts": 9}, "vocabulary": {"size": 513}}, r"vocabulary\.size"),
        ({"prompts": {"expected_prompts": 9}, "features": {"layer_ids": [9]}}, r"features\.layer_ids"),
        ({"prompts": {"expected_prompts": 9}, "verifier": {"path": "nowhere"}}, "nowhere"),
    ],
)
def test_contradictions_are_one_sentence(
    make_config: Callable[..., RunConfig], monkeypatch: Any, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        plan(make_config(**changes))


def test_ray_that_is_not_installed_is_named(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    planning.require_runner(make_config())
    monkeypatch.setattr(planning, "find_spec", lambda name: None)
    planning.require_runner(make_config())
    with pytest.raises(
        InputError, match=r"servers\.runner: ray needs the package prefect-ray; pip install 'slipstream\[ray\]'"
    ):
        planning.require_runner(make_config(servers={"runner": "ray"}))
