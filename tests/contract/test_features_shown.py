"""What Prefect shows of a capture, read back through its API: plan, progress, store, lineage; and a run retried."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.capture_features import capture_features
from slipstream.artifact import claim
from slipstream.config import FeaturesConfig
from tasks.features_shown import store_rows
from tests.contract.capturing import configuration, traces_of

pytestmark = pytest.mark.usefixtures("results")
ROWS, TOKENS = 10, 2 * (3 + 4 + 5 + 6 + 7)  # ten rows of three to seven tokens
HIDDEN_BYTES = 4 * 128 * 4 * TOKENS


def shown(*keys: str) -> dict[str, Any]:
    """The newest artifact of each key, as the API gives it."""

    async def read() -> dict[str, Any]:
        async with get_client() as client:
            wanted = ArtifactFilter(key=ArtifactFilterKey(any_=list(keys)))
            found = await client.read_artifacts(artifact_filter=wanted)
        return {artifact.key: artifact for artifact in sorted(found, key=lambda artifact: artifact.created)}

    return asyncio.run(read())


def test_plan_progress_store_and_lineage(tmp_path: Path) -> None:
    config = configuration(tmp_path / "work", {}, shards=3)
    with claim(config.root, "prompts", "p") as folder:
        (folder.path / "train.jsonl").write_text("")
        counts = {"train": 8, "validation": 2, "held_out": 4}
        parts = {"traced": "content-of-traced"}
        folder.commit(version=1, recipe={}, inputs={}, content="p", parts=parts, files=["train.jsonl"], counts=counts)
    traces = traces_of(config, ROWS, prompts="content-of-traced")
    store, shards = capture_features(config, traces.path)

    artifacts = shown(
        "features-plan", "features-store", "features-lineage", *[f"features-shard-{i}-progress" for i in range(3)]
    )
    plan = artifacts["features-plan"].data
    assert "bytes a token" in artifacts["features-plan"].description
    rows = store_rows(shards)
    assert plan is not None
    assert artifacts["features-store"].data is not None
    total = rows[-1]
    assert (total["shard"], total["samples"], total["tokens"], total["lost"]) == ("total", "10", str(TOKENS), "0")
    assert [row["shard"] for row in rows] == ["0", "1", "2", "total"]
    assert int(total["bytes"].replace(",", "")) > HIDDEN_BYTES
    assert all("all files there in full" in row["checksums"] for row in rows)
    for i in range(3):
        assert artifacts[f"features-shard-{i}-progress"].data == 100.0
    page = artifacts["features-lineage"].data
    steps = "[prompts](/artifacts/key/prompts) → [traces](/artifacts/key/traces) → [features](/artifacts/key/features)"
    assert steps in page
    for text in (store.key, store.content[:12], traces.content[:12], "8 train, 2 validation, 4 held-out"):
        assert text in page

    again, _ = capture_features(config, traces.path)
    assert again == store
    plan = shown("features-plan")["features-plan"].data
    assert '"rows to capture": "0"' in str(plan).replace("'", '"')


def test_the_table_names_what_is_lost_from_the_disk(tmp_path: Path) -> None:
    config = configuration(tmp_path / "work", {}, shards=2)
    _, shards = capture_features(config, traces_of(config, ROWS).path)
    name = next(name for name in shards[1].manifest().files if name.endswith(".safetensors"))
    (shards[1].folder / name).unlink()
    files = len(shards[1].manifest().files)
    assert [row["checksums"] for row in store_rows(shards)][1] == f"1 of {files} files damaged"


def test_features_replace_the_configurations(tmp_path: Path) -> None:
    config = configuration(tmp_path / "work", {}, shards=1)
    other = FeaturesConfig(**config.features.model_dump() | {"shards": 4})
    _, shards = capture_features(config, traces_of(config, ROWS).path, features=other)
    assert len(shards) == 4


def test_a_run_that_failed_after_the_subflow_captures_nothing_again(tmp_path: Path) -> None:
    """A retry of the parent runs the completed subflow anew, whose tasks are all found finished."""
    config = configuration(tmp_path / "work", {}, shards=2)
    traces, made = traces_of(config, ROWS), []

    @flow(retries=1, persist_result=False)
    def parent() -> None:
        made.append(capture_features(config, traces.path))
        if len(made) == 1:
            raise RuntimeError("after the subflow")

    parent()
    assert len(made) == 2
    assert made[0] == made[1]
    manifests = [shard.manifest() for shard in made[1][1]]
    assert sum(manifest.work["captured"] for manifest in manifests) == ROWS  # those of the first attempt, untouched
