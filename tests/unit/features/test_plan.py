"""The plan of a capture: exact shards, only what is missing counts, refused before a server starts."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save
from stub_server import states_of

from slipstream import verifier
from slipstream.artifact import Artifact, claim
from slipstream.config import RunConfig
from slipstream.digest import digest
from slipstream.errors import InputError
from slipstream.features.plan import Load, plan_capture
from slipstream.features.recipe import open_pool
from slipstream.plan import plan
from slipstream.traces.origin import open_traces

Usage = namedtuple("Usage", "total used free")
LAYERS, HIDDEN = 4, 128  # three auxiliary layers and the final state of the pocket verifier
NATIVE = LAYERS * HIDDEN * 4  # float32
FP8 = LAYERS * HIDDEN + 4  # one byte a value, one float32 scale a token


@pytest.fixture
def traces_of(tmp_path: Path) -> Callable[..., Artifact]:
    """A traces artifact with rows of these token ids."""

    def make(rows: list[list[int]], recipe: dict[str, Any] | None = None) -> Artifact:
        key = digest([rows, recipe])
        columns = {"key": pa.string(), "split": pa.string(), "prompt_tokens": pa.int64()}
        schema = pa.schema([*columns.items(), ("input_ids", pa.list_(pa.int64()))])
        table = [{"key": f"k{i}", "split": "train", "prompt_tokens": 1, "input_ids": ids} for i, ids in enumerate(rows)]
        with claim(tmp_path / "work", "traces", key) as folder:
            pq.write_table(pa.Table.from_pylist(table, schema), folder.path / "traces.parquet")
            return folder.commit(version=1, recipe=recipe or {}, inputs={}, content=key, files=["traces.parquet"])

    return make


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the free bytes that the file system reports."""

    def set_free(amount: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**15, 0, int(amount)))

    return set_free


def capture(config: RunConfig, tokens: list[int], workdir: Path) -> None:
    """Puts the sample of `tokens` into the pool."""
    captured = workdir / "sample.safetensors"
    states = states_of(tokens, LAYERS, HIDDEN)
    captured.write_bytes(save({"hidden_states": states, "token_ids": np.asarray(tokens, dtype=np.int64)}))
    open_pool(workdir, config).add(tokens, captured)


def distinct(count: int, tokens: int = 10) -> list[list[int]]:
    """`count` different rows of `tokens` tokens."""
    return [[1 + i, *range(2, 1 + tokens)] for i in range(count)]


@pytest.mark.parametrize("count", [1, 3, 10])
def test_every_row_is_in_one_shard_and_empty_shards_are_fine(
    count: int, traces_of: Callable[..., Artifact], make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config(features={"shards": 8})
    planned = plan_capture(tmp_path / "work", config, traces_of(distinct(count)))
    assert len(planned.shards) == 8
    covered = [row for part in planned.shards for row in range(part.shard.start, part.shard.stop)]
    assert covered == list(range(count))
    assert [part.whole.rows for part in planned.shards] == [p.shard.stop - p.shard.start for p in planned.shards]
    assert sum(part.whole == Load() for part in planned.shards) == max(0, 8 - count)
    assert planned.whole == planned.missing == Load(count, 10 * count)


def test_no_rows_are_refused(
    traces_of: Callable[..., Artifact], make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="no rows"):
        plan_capture(tmp_path / "work", make_config(features={"shards": 8}), traces_of([]))


@pytest.mark.parametrize(("store", "each"), [("native", NATIVE), ("fp8", FP8)])
def test_bytes_and_time_are_those_of_the_missing_tokens(
    store: str,
    each: int,
    traces_of: Callable[..., Artifact],
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    free: Callable[[float], None],
) -> None:
    config = make_config(
        features={"store": store, "shards": 2, "disk_reserve_gib": 3}, rates={"features_tokens_per_s": 25}
    )
    free(5e12)
    planned = plan_capture(tmp_path / "work", config, traces_of(distinct(20)))
    assert planned.missing_bytes == 200 * each
    assert planned.needed == round(200 * each * 1.05) + 3 * 2**30
    assert planned.seconds == 8
    assert planned.free == 5 * 10**12


def test_a_store_of_nothing_captures_nothing(
    traces_of: Callable[..., Artifact], make_config: Callable[..., RunConfig], tmp_path: Path, free: Callable[..., None]
) -> None:
    free(0)
    planned = plan_capture(tmp_path / "work", make_config(features={"store": "none"}), traces_of(distinct(5)))
    assert (planned.shards, planned.missing_bytes, planned.needed) == ((), 0, 0)
    planned.require_space(tmp_path)


def test_what_the_pool_has_is_not_counted_and_repeated_rows_count_once(
    traces_of: Callable[..., Artifact], make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config, rows = make_config(features={"shards": 2}), distinct(6)
    traces = traces_of([*rows, rows[4]])
    capture(config, rows[1], tmp_path / "work")
    planned = plan_capture(tmp_path / "work", config, traces)
    assert planned.whole == Load(7, 70)
    assert planned.missing == Load(5, 50)
    assert [part.missing.rows for part in planned.shards] == [3, 2]  # of rows 0 to 3 and 4 to 6


def test_what_does_not_fit_is_refused_with_both_figures(
    traces_of: Callable[..., Artifact], make_config: Callable[..., RunConfig], tmp_path: Path, free: Callable[..., None]
) -> None:
    config, traces = make_config(features={"disk_reserve_gib": 2}), traces_of(distinct(1000, 20))
    needed = round(20_000 * NATIVE * 1.05) + 2 * 2**30
    free(needed)
    plan_capture(tmp_path / "work", config, traces).require_space(tmp_path)
    free(needed - 1)
    with pytest.raises(InputError, match=r"0\.04 GB of hidden states.*2\.19 GB are needed.*has 2\.19 GB free"):
        plan_capture(tmp_path / "work", config, traces).require_space(tmp_path)


def test_a_finished_capture_needs_no_space(
    traces_of: Callable[..., Artifact], make_config: Callable[..., RunConfig], tmp_path: Path, free: Callable[..., None]
) -> None:
    config, row = make_config(), distinct(1)[0]
    traces = traces_of([row])
    capture(config, row, tmp_path / "work")
    free(0)
    plan_capture(tmp_path / "work", config, traces).require_space(tmp_path)


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ({"device": "cuda", "gpus": 8, "tensor_parallel": 8}, (1, 8)),
        ({"device": "cuda", "gpus": 8}, (8, 1)),
        ({"device": "cpu", "gpus": 2}, (2, 0)),
        ({"features_endpoints": ["http://a/v1", "http://b/v1", "http://c/v1"], "features_storage": "s"}, (3, 0)),
    ],
)
def test_servers_are_as_many_as_the_gpus_allow(
    servers: dict[str, Any],
    expected: tuple[int, int],
    traces_of: Callable[..., Artifact],
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
) -> None:
    planned = plan_capture(tmp_path / "work", make_config(servers=servers), traces_of(distinct(3)))
    assert (planned.servers, planned.gpus_each) == expected


@pytest.mark.parametrize(
    ("features", "each", "hours"),
    [
        ({}, NATIVE, 1.0),
        ({"store": "fp8"}, FP8, 1.0),
        ({"store": "none"}, 0, 5.0),  # every one of five epochs asks again
        ({"capture_while_generating": True}, NATIVE, 0.0),
    ],
)
def test_the_plan_of_the_whole_run_counts_the_form_of_the_store(
    features: dict[str, Any], each: int, hours: float, make_config: Callable[..., RunConfig]
) -> None:
    given = {"prompts": {"expected_prompts": 1000, "held_out_ratio": 0.2}, "drafter": {"epochs": 5}}
    traces = {"expected_tokens_per_trace": 45}
    estimate = plan(
        make_config(**given, traces=traces, features=features, rates={"features_tokens_per_s": 10})  # 36,000 tokens
    )
    assert (estimate["bytes_per_token"], estimate["feature_store_bytes"]) == (each, 36_000 * each)
    assert estimate["hours"]["features"] == hours


def test_traces_of_another_verifier_are_refused_with_both_identities(
    traces_of: Callable[..., Artifact], make_config: Callable[..., RunConfig]
) -> None:
    config = make_config()
    mine = verifier.identity(config.verifier)
    own = traces_of(distinct(2), {"verifier": mine})
    assert open_traces(config, own.folder) == own
    foreign = traces_of(distinct(2), {"verifier": "0" * 32})
    with pytest.raises(InputError, match=f"another verifier .unknown, digest {'0' * 32}. .*digest {mine}"):
        open_traces(config, foreign.folder)


def test_what_is_no_intact_traces_artifact_is_refused(
    traces_of: Callable[..., Artifact], make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config()
    with pytest.raises(InputError, match="not a finished artifact"):
        open_traces(config, tmp_path)
    with claim(tmp_path / "work", "vocabulary", "v") as folder:
        (folder.path / "t2d.npy").write_bytes(b"x")
        other = folder.commit(version=1, recipe={}, inputs={}, content="v", files=["t2d.npy"])
    with pytest.raises(InputError, match=r"stage vocabulary, not traces"):
        open_traces(config, other.folder)
    cut = traces_of(distinct(2))
    (cut.folder / "traces.parquet").write_bytes(b"x")
    with pytest.raises(InputError, match=r"traces\.parquet is 1 bytes instead of"):
        open_traces(config, cut.folder)
