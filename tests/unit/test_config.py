"""The run configuration: what validates, what is refused in one sentence, what is in a recipe."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from slipstream import config
from slipstream.config import RunConfig, load_config, rehearsal
from slipstream.digest import digest
from slipstream.errors import InputError
from slipstream.features.recipe import recipe

DEPLOYMENTS = sorted((Path(__file__).parents[2] / "deployments").glob("*.yaml"))
STAGES = [kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, config.Stage)]


def load(values: dict[str, Any], folder: Path) -> RunConfig:
    """`values` written as YAML and read."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_config(path)


def change(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`values` with the dotted `key` set; a number is a place in a list."""
    parts = [int(part) if part.isdigit() else part for part in key.split(".")]
    inner: Any = values
    for part, child in pairwise(parts):
        if isinstance(part, str):
            inner.setdefault(part, [{}] if isinstance(child, int) else {})
        inner = inner[part]
    inner[parts[-1]] = value
    return values


def test_there_are_deployments() -> None:
    assert {"pocket.yaml", "smoke.yaml", "kimi-k2.5-8gpu.yaml"} <= {path.name for path in DEPLOYMENTS}


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_every_deployment_validates(path: Path) -> None:
    loaded = load_config(path)
    assert loaded.name == yaml.safe_load(path.read_text())["name"]
    assert RunConfig.model_validate(loaded.model_dump(mode="json")) == loaded


def test_the_reference_job(root: Path) -> None:
    loaded = load_config(root / "deployments" / "kimi-k2.5-8gpu.yaml")
    assert loaded.features.layer_ids == [2, 30, 58]
    assert (loaded.servers.replicas, loaded.vocabulary.size) == (1, 32000)
    assert (loaded.drafter.epochs, loaded.drafter.learning_rate, loaded.drafter.sequence_length) == (5, 3e-5, 2048)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epochz", 3),
        ("drafter.epochz", 3),
        ("drafter.shape.heads", 4),
        ("traces.max_token", 5),
        ("traces.temperature", 0.5),
        ("traces.sampling.0.temp", 1),
        ("prompts.sources.0.paths", "x"),
    ],
)
def test_an_unknown_key_is_named(values: dict[str, Any], tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        load(change(values, key, value), tmp_path)
    sentence = str(caught.value)
    assert f"unknown key `{key}`" in sentence
    assert "run.yaml" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "Bad Name"),
        ("name", "../up"),
        ("name", "latest"),  # runs/latest is the link to the newest run
        ("prompts.sources", []),
        ("prompts.sources", "prompts.jsonl"),
        ("prompts.sources.0", "prompts.jsonl"),
        ("prompts.sources.0.path", ""),
        ("prompts.sources.0.weight", 0),
        ("prompts.sources.0.weight", float("inf")),
        ("prompts.limit", 2),
        ("prompts.held_out_ratio", 1),
        ("prompts.held_out_ratio", -0.1),
        ("prompts.val_ratio", 0),
        ("prompts.max_rejected_share", 1),
        ("verifier.dtype", "int8"),
        ("verifier.max_model_len", 0),
        ("servers.device", "tpu"),
        ("servers.gpus", 0),
        ("traces.max_tokens", 0),
        ("traces.sampling", []),
        ("traces.sampling.0.weight", 0),
        ("traces.sampling.0.temperature", -1),
        ("traces.sampling.0.temperature", float("inf")),
        ("traces.sampling.0.top_p", 0),
        ("traces.sampling.0.top_p", 1.1),
        ("traces.sampling.0.top_k", -1),
        ("traces.sampling.0.reasoning_effort", "extreme"),
        ("traces.max_attempts", 0),
        ("traces.endpoint_patience_s", 0),
        ("traces.min_supervised_share", -0.1),
        ("traces.max_supervised_share", 1.1),
        ("traces.max_truncated_share", 1.1),
        ("traces.max_mismatch_share", 1),
        ("features.layer_ids", []),
        ("features.max_lost_share", 1.5),
        ("vocabulary.size", 0),
        ("drafter.learning_rate", 0),
        ("drafter.learning_rate", "fast"),
        ("drafter.learning_rate", float("nan")),
        ("drafter.learning_rate", float("inf")),
        ("drafter.scheduler", "step"),
        ("drafter.shape.head_dim", None),
        ("acceptance.draft_tokens", 0),
    ],
)
def test_a_bad_value_is_named(values: dict[str, Any], tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        load(change(values, key, value), tmp_path)
    assert f"`{key}`" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("features.layer_ids", [3, 2], "ascending"),
        ("features.layer_ids", [2, 2], "distinct"),
        ("features.layer_ids", [-1, 2], "not negative"),
        ("prompts.held_out_ratio", 0, "held_out_sources"),
        ("prompts.sources", [{"path": "a", "weight": 1}, {"path": "b"}], "every one of sources a weight, or none"),
        ("prompts.held_out_sources", [{"path": "a", "weight": 1}], "weights belong to sources"),
        ("traces", {"min_supervised_share": 0.5, "max_supervised_share": 0.4}, "min_supervised_share"),
        ("verifier.trust_remote_code", True, "pinned revision"),
        ("servers.features_endpoints", ["http://127.0.0.1:1/v1"], "features_storage"),
        ("servers", {"gpus": 3, "tensor_parallel": 2}, "multiple"),
        ("servers", {"ray_address": "head:6379"}, "runner is threads"),
        ("servers", {"device": "cpu", "start_ahead": True, "runner": "ray"}, "start_ahead"),
        ("drafter.shape.num_key_value_heads", 3, "multiple"),
        ("acceptance.untrained", True, "keep_initial"),
    ],
)
def test_a_contradiction_says_what_to_do(
    values: dict[str, Any], tmp_path: Path, key: str, value: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        load(change(values, key, value), tmp_path)


def test_a_shape_that_cannot_be_exported_is_refused_before_hours_of_training(
    values: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="num_layers"):
        load(change(values, "drafter.shape.num_layers", 2), tmp_path)


def test_a_missing_section_is_named(values: dict[str, Any], tmp_path: Path) -> None:
    del values["verifier"]
    with pytest.raises(InputError, match="`verifier`: field required"):
        load(values, tmp_path)


@pytest.mark.parametrize("text", ["", "- 1\n", "name: [\n", "a: b: c\n", "\tname: x\n"])
def test_what_is_not_a_mapping_in_yaml_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_config(tmp_path / "run.yaml")
    assert "run.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nothing.yaml", "."])
def test_an_unreadable_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot read"):
        load_config(tmp_path / name)


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(InputError, match=r"run\.yaml"):
        load_config(tmp_path / "run.yaml")


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"name: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'ran'}]\n")
    with pytest.raises(InputError):
        load_config(tmp_path / "run.yaml")


def test_frozen(make_config: Callable[..., RunConfig]) -> None:
    made = make_config()
    with pytest.raises(ValidationError):
        made.name = "other"
    with pytest.raises(ValidationError):
        made.traces.max_tokens = 1


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_every_runtime_name_is_a_field(stage: type[config.Stage]) -> None:
    assert set(stage.model_fields) >= stage.RUNTIME


def test_recipes_leave_out_what_cannot_change_the_outcome(make_config: Callable[..., RunConfig]) -> None:
    made = make_config()
    for section in ("prompts", "servers", "traces", "features", "vocabulary", "drafter", "acceptance"):
        stage = getattr(made, section)
        assert set(stage.recipe()) == set(type(stage).model_fields) - stage.RUNTIME
    assert set(made.servers.recipe()) == set()
    assert "concurrency" not in made.traces.recipe()
    assert "shards" not in made.features.recipe()
    assert "num_workers" not in made.drafter.recipe()


def test_equal_numbers_make_equal_recipes(make_config: Callable[..., RunConfig]) -> None:
    whole, real = (make_config(traces={"sampling": [{"temperature": given}]}) for given in (1, 1.0))
    assert digest(whole.traces.recipe()) == digest(real.traces.recipe())


def test_where_a_source_lies_is_no_part_of_its_recipe() -> None:
    one, other = (config.Source(path=path, domain="d") for path in ("a.jsonl", "b.jsonl"))
    assert one.recipe() == other.recipe()
    assert set(one.recipe()) == {"weight", "domain", "split", "subset", "revision"}


def test_a_trace_is_greedy_unless_the_configuration_says_otherwise(make_config: Callable[..., RunConfig]) -> None:
    (only,) = make_config().traces.sampling
    assert (only.temperature, only.top_p, only.top_k, only.thinking, only.reasoning_effort) == (0, 1, 0, True, None)


def test_every_field_has_a_description() -> None:
    def bare(model: type[BaseModel], path: str) -> list[str]:
        names = []
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, config.Stage):
                names += bare(field.annotation, f"{path}{name}.")
                if not field.description and not field.annotation.__doc__:
                    names.append(path + name)
            elif not field.description:
                names.append(path + name)
        return names

    assert bare(RunConfig, "") == []


def test_root_is_absolute_and_follows_the_environment(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_WORKDIR", str(tmp_path / "elsewhere"))
    assert make_config().root == tmp_path / "work"
    assert make_config(workdir=None).root == tmp_path / "elsewhere"
    monkeypatch.delenv("SLIPSTREAM_WORKDIR")
    monkeypatch.chdir(tmp_path)
    assert make_config(workdir=None).root == tmp_path / "work"


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_rehearsal(path: Path) -> None:
    whole = load_config(path)
    small = rehearsal(whole)
    assert (small.prompts.limit, small.prompts.val_ratio) == (10, 0.2)
    assert (small.drafter.epochs, small.drafter.num_workers) == (3, 0)
    assert len(small.drafter.devices) <= 1
    assert set(small.drafter.devices) <= set(whole.drafter.devices)
    assert small.root != whole.root
    assert small.root.is_relative_to(whole.root)
    assert small.name != whole.name
    assert (small.servers, small.verifier, small.features) == (whole.servers, whole.verifier, whole.features)
    assert small.drafter.shape == whole.drafter.shape
    assert RunConfig.model_validate(small.model_dump(mode="json")) == small


def test_anchored_paths_are_absolute_and_change_no_key(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(root)
    relative = {"verifier": {"path": "slipstream/pocket/verifier"}, "workdir": "w"}
    config = make_config(**relative, servers={"features_endpoints": ["http://a/v1"], "features_storage": "states"})
    anchored = config.anchored()
    monkeypatch.chdir(tmp_path)
    assert anchored.root == root / "w"
    assert anchored.verifier.path == str(root / "slipstream/pocket/verifier")
    assert anchored.servers.python == str(root / ".venv-serve/bin/python")
    assert anchored.servers.features_storage == str(root / "states")
    assert recipe(anchored)["verifier"] == recipe(make_config())["verifier"]
    assert make_config().anchored().servers.features_storage is None


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.stem)
def test_other_features_are_held_to_the_rest_of_the_configuration(path: Path) -> None:
    given = load_config(path)
    other = given.features.model_copy(update={"shards": 7})
    assert given.with_features(other) == given.model_copy(update={"features": other})
    imported = given.model_copy(update={"traces": given.traces.model_copy(update={"imported": "some/folder"})})
    generating = given.features.model_copy(update={"capture_while_generating": True})
    with pytest.raises(ValidationError, match=r"traces\.imported leaves nothing to generate"):
        imported.with_features(generating)
