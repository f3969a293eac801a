"""Whose tokens a traces artifact holds: another verifier's or tokenizer's are refused with both names and digests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream import verifier
from slipstream.artifact import Artifact, claim
from slipstream.config import RunConfig
from slipstream.errors import InputError
from slipstream.features.rows import plan_shards
from slipstream.traces import origin, stage

Make = Callable[..., RunConfig]


def traces_of(root: Path, **kept: Any) -> Artifact:
    """A traces artifact of one row whose manifest keeps `recipe` and `origin`."""
    with claim(root, "traces", "k") as folder:
        row = {"key": "a", "split": "train", "prompt_tokens": 1, "input_ids": [1, 2], "loss_mask": [0, 1]}
        pq.write_table(pa.Table.from_pylist([row]), folder.path / "traces.parquet")
        recipe, from_ = kept.get("recipe", {}), kept.get("origin", {})
        return folder.commit(version=1, recipe=recipe, inputs={}, content="c", files=["traces.parquet"], origin=from_)


@pytest.fixture
def another(tmp_path: Path, root: Path) -> Callable[[str], Path]:
    """A copy of the pocket verifier with one file changed."""

    def make(name: str) -> Path:
        folder = tmp_path / "another-model"
        shutil.copytree(root / "slipstream/pocket/verifier", folder)
        value = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(value | {"changed": True}))
        return folder

    return make


@pytest.mark.parametrize(("changed", "what"), [("config.json", "verifier"), ("tokenizer.json", "tokenizer")])
def test_other_origins_are_refused(
    tmp_path: Path, make_config: Make, another: Callable[[str], Path], changed: str, what: str
) -> None:
    config = make_config()
    other = make_config(verifier={"path": str(another(changed))})
    traces = traces_of(config.root, origin=origin.origin(other.verifier))
    with pytest.raises(InputError) as caught:
        plan_shards(config, traces)
    digests = {"verifier": verifier.identity, "tokenizer": verifier.tokenizer_identity}[what]
    for word in (f"another {what}", "another-model", digests(other.verifier), digests(config.verifier), "pocket"):
        assert word in str(caught.value)


def test_a_manifest_without_origin_is_known_by_its_recipe(tmp_path: Path, make_config: Make) -> None:
    config = make_config()
    assert plan_shards(config, traces_of(config.root, recipe={"verifier": verifier.identity(config.verifier)}))
    with pytest.raises(InputError, match=r"another verifier \(unknown, digest 0123\)"):
        plan_shards(config, traces_of(config.root, recipe={"verifier": "0123"}))


def test_what_is_not_known_is_not_compared(make_config: Make) -> None:
    config = make_config()
    assert plan_shards(config, traces_of(config.root))


def test_imported_traces_take_the_place_of_the_stage(tmp_path: Path, make_config: Make) -> None:
    config = make_config()
    traces = traces_of(config.root, origin=origin.origin(config.verifier))
    taking = make_config(traces={"imported": traces.path})
    prompts = Artifact(path="", stage="prompts", key="", content="", parts={"traced": "x"})
    assert stage.key(taking, prompts) == "k"
    assert stage.run(config.root, taking, prompts, lambda logs: pytest.fail("asked"), lambda progress: None) == traces


def test_imported_traces_of_another_verifier(make_config: Make, another: Callable[[str], Path]) -> None:
    other = make_config(verifier={"path": str(another("config.json"))})
    traces = traces_of(other.root, origin=origin.origin(other.verifier))
    with pytest.raises(InputError, match="another verifier"):
        origin.imported(make_config(traces={"imported": traces.path}))


@pytest.mark.parametrize(
    ("stage_name", "words"), [(None, "not a finished artifact"), ("features", "stage features, not traces")]
)
def test_what_is_no_traces_artifact(tmp_path: Path, make_config: Make, stage_name: str | None, words: str) -> None:
    folder = tmp_path / "else"
    folder.mkdir()
    if stage_name:
        with claim(tmp_path, stage_name, "k") as made:
            made.commit(version=1, recipe={}, inputs={}, content="c", files=[])
        folder = tmp_path / stage_name / "k"
    with pytest.raises(InputError, match=words):
        origin.imported(make_config(traces={"imported": str(folder)}))


def test_damaged_imported_traces(make_config: Make) -> None:
    config = make_config()
    traces = traces_of(config.root)
    (traces.folder / "traces.parquet").write_bytes(b"")
    with pytest.raises(InputError, match=r"traces\.parquet is 0 bytes instead of"):
        origin.imported(make_config(traces={"imported": traces.path}))


def test_the_setting_does_not_change_keys(make_config: Make) -> None:
    assert "imported" not in make_config().traces.recipe()
