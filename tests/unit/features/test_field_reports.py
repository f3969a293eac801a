"""What went wrong for others who captured hidden states, by number of the report, with the outcome it asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file
from stub_server import Capture, StubServer, states_of

from slipstream import serving
from slipstream.artifact import Artifact
from slipstream.config import RunConfig, ServersConfig, VerifierConfig
from slipstream.digest import digest_tokens
from slipstream.errors import InputError, StageFailed
from slipstream.features import shard_stage
from slipstream.features.extraction import process_name
from slipstream.features.rows import plan_shards
from slipstream.features.shards import split_rows
from tests.unit.features.test_store import HIDDEN, Runner, rows_of, states


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer(hidden=HIDDEN) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path, stub: StubServer, make_config: Callable[..., RunConfig], no_backoff: None) -> Runner:
    return Runner(tmp_path / "work", stub, make_config)


def lost(folder: Path) -> list[dict[str, Any]]:
    """The lost rows of a stage folder."""
    return [json.loads(line) for line in (folder / "lost.jsonl").read_text().splitlines()]


def stored(work: Path, tokens: list[int]) -> list[Path]:
    """Files under their final name for these tokens, in any pool."""
    return list(work.glob(f"pool/features/*/*/{digest_tokens(tokens)}.safetensors"))


def test_20_states_of_the_uncached_tail_are_never_taken_for_the_whole_prompt(run: Runner) -> None:
    rows = rows_of(4)
    tail = {"key": "tail", "input_ids": [7, 6, 5, 4, 3, 2], "loss_mask": [0, 1, 1, 1, 1, 1], "prompt_tokens": 1}
    rows.insert(1, tail | {"split": "train"})

    def cached(tokens: list[int], number: int) -> Capture:
        return Capture(states=states_of(tokens[2:], 4, HIDDEN)) if tokens == tail["input_ids"] else Capture()

    run.stub.on_capture(cached)
    made = run(rows, shards=1, max_attempts=2, max_lost_share=0.5)
    assert run.asked().count(tail["input_ids"]) == 2
    assert stored(run.root, tail["input_ids"]) == []
    (shard,) = run.root.glob("feature-shards/*")
    (entry,) = lost(shard)
    assert entry["trace"] == "tail"
    assert f"shape [4, 4, {HIDDEN}] instead of [6, 4, {HIDDEN}]" in entry["reason"]
    assert [states(made.folder, i)["token_ids"].tolist() for i in range(4)] == [
        row["input_ids"] for row in rows if row is not rows[1]
    ]


def test_20_servers_start_without_a_prefix_cache(tmp_path: Path) -> None:
    servers = ServersConfig(python=str(tmp_path / "python"), device="cpu")
    (tmp_path / "python").touch()
    spec = serving.extraction_server([2, 3, 5, 6], tmp_path, False)
    assert "--no-enable-prefix-caching" in serving.command(VerifierConfig(path="v"), servers, spec, 8000)


def in_text_order(count: int) -> Callable[[list[int], int], Capture]:
    """Answers the n-th request with the sample that is n-th when numbers are sorted as text: 0, 1, 10, 11, 2."""
    asked: list[list[int]] = []
    order = [int(name) for name in sorted(map(str, range(count)))]

    def decide(tokens: list[int], number: int) -> Capture:
        if number >= count:
            return Capture()
        asked.append(tokens)
        other = order[number]
        return Capture(tokens=asked[other] if other < len(asked) else [1, 2])

    return decide


def test_21_twelve_samples_in_text_order_are_not_paired_by_position(run: Runner) -> None:
    rows = rows_of(12)
    run.stub.on_capture(in_text_order(12))
    made = run(rows, shards=1, concurrency=1, max_attempts=13)
    for i, row in enumerate(rows):
        assert states(made.folder, i)["token_ids"].tolist() == row["input_ids"]
        assert np.array_equal(states(made.folder, i)["hidden_states"], states_of(row["input_ids"], 4, HIDDEN))
    assert len(run.asked()) > 12  # some came to the wrong request and were asked for again


def test_21_a_server_that_stops_after_32_is_no_success(run: Runner) -> None:
    rows = rows_of(40)
    run.stub.on_capture(lambda tokens, number: Capture(status=400 if number >= 32 else 200))
    with pytest.raises(StageFailed, match="8 of 40 samples"):
        run(rows, shards=1)
    (shard,) = run.root.glob("feature-shards/*")
    missing = [entry["row"] for entry in lost(shard)]
    assert len(missing) == 8
    assert not (shard / "manifest.json").exists()
    assert list(run.root.glob("features/*")) == []
    asked = len(run.asked())
    run.stub.on_capture(lambda tokens, number: Capture())
    made = run(rows, shards=1)
    assert sorted(run.asked()[asked:]) == sorted(rows[row]["input_ids"] for row in missing)
    assert made.manifest().counts["rows"] == 40


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_23_nan_and_infinity_are_rejected_with_sample_and_layer(run: Runner, value: float) -> None:
    rows = rows_of(12)

    def poisoned(tokens: list[int], number: int) -> Capture:
        held = states_of(tokens, 4, HIDDEN)
        if tokens[0] in (203, 205):
            held[2, 1 if tokens[0] == 203 else 3, 3] = value
        return Capture(states=held)

    run.stub.on_capture(poisoned)
    made = run(rows, shards=1, max_lost_share=0.2)
    (shard,) = run.root.glob("feature-shards/*")
    found = {entry["trace"]: entry["reason"] for entry in lost(shard)}
    assert sorted(found) == ["k003", "k005"]
    assert "token 2, layer position 1" in found["k003"]
    assert "token 2, layer position 3" in found["k005"]
    visible = pq.read_table(made.folder / "index.parquet").to_pylist()
    assert not {"k003", "k005"} & {entry["trace"] for entry in visible}
    assert {entry["non_finite"] for entry in visible} == {0}
    for path in (made.folder / "hidden_states").iterdir():
        assert np.isfinite(load_file(path)["hidden_states"]).all()


def test_23_too_many_of_them_fail_the_stage(run: Runner) -> None:
    run.stub.on_capture(lambda tokens, number: Capture(states=np.full((len(tokens), 4, HIDDEN), np.nan, np.float32)))
    with pytest.raises(StageFailed, match=r"12 of 12 samples .* the first: NaN or infinity at token 0"):
        run(rows_of(12), shards=1)


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_25_truncated_files_are_made_again_alone_and_leftovers_removed(run: Runner, index: str) -> None:
    """hs_0 is good, hs_1 is half, hs_2 empty, hs_3 a byte short, hs_4 a leftover of its writing alone."""
    rows = rows_of(8)
    first = run(rows, shards=1)
    whole = {i: (first.folder / "hidden_states" / f"hs_{i}.safetensors").read_bytes() for i in range(5)}
    files = {i: stored(run.root, rows[i]["input_ids"])[0] for i in range(5)}
    for i, length in ((1, len(whole[1]) // 2), (2, 0), (3, len(whole[3]) - 1)):
        with files[i].open("r+b") as file:  # the store's hs_<i> is a link to it
            file.truncate(length)
    host = process_name().rpartition("-")[0]
    incoming = run.root / "pool" / "features" / "incoming" / f"{host}-99999999-copies"
    incoming.mkdir(parents=True)
    (incoming / files[4].name).write_bytes(whole[4][:100])
    (first.folder / "hidden_states" / "hs_4.safetensors").unlink()
    (first.folder / "hidden_states" / "hs_4.safetensors.tmp").write_bytes(whole[4][:100])
    files[4].unlink()
    if index == "lost":
        for path in files[0].parents[1].glob("index.sqlite3*"):
            path.unlink()
    asked = len(run.asked())
    again = run(rows, shards=1)
    assert sorted(run.asked()[asked:]) == sorted(rows[i]["input_ids"] for i in (1, 2, 3, 4))
    assert again == first
    assert again.verify(deep=True) == []
    for i, data in whole.items():
        assert (again.folder / "hidden_states" / f"hs_{i}.safetensors").read_bytes() == data
    assert [path for path in run.root.rglob("*") if path.suffix == ".tmp"] == []
    assert not incoming.exists()


@pytest.mark.parametrize("rows", [3, 10])
def test_31_eight_workers_with_few_samples(run: Runner, rows: int) -> None:
    """Every index has one owner, an idle one is a success, and another number of workers finishes the rest."""
    given = rows_of(rows)
    traces = run.traces(given)
    config = run.make(features={"shards": 8})
    planned = plan_shards(config, traces)
    assert sorted(row for shard in planned for row in range(shard.start, shard.stop)) == list(range(rows))
    first: list[Artifact] = [
        shard_stage.capture_shard(run.root, config, traces, shard, run.lend, lambda progress: None)
        for shard in planned[:4]
    ]
    done = sum(artifact.manifest().counts["samples"] for artifact in first)
    assert done == len(run.asked()) < rows
    made = run(given, shards=2)
    assert sorted(run.asked()) == sorted(row["input_ids"] for row in given)
    assert made.manifest().counts["rows"] == rows


def test_31_no_samples_at_all_end_before_a_server_starts(run: Runner) -> None:
    with pytest.raises(InputError, match="no rows"):
        split_rows([], 8)
    empty = run.traces([])
    with pytest.raises(InputError, match="no rows"):
        run.shards(empty)
    assert run.lent == 0


def test_the_manifest_of_a_shard_says_who_made_it_and_what_happened(run: Runner) -> None:
    run.stub.version = "0.32.0"
    traces = run.traces(rows_of(6))
    (shard,) = run.shards(traces, shards=1)
    work = shard.manifest().work
    assert (work["vllm"], work["restarts"], work["suspects"], work["paused_s"]) == ("0.32.0", 0, 0, 0.0)
    assert (work["captured"], work["reused"]) == (6, 0)


def test_rows_with_the_same_tokens_are_one_request(run: Runner) -> None:
    rows = rows_of(4)
    made = run([rows[0], rows[0] | {"key": "twin"}, *rows[1:]], shards=1)
    assert len(run.asked()) == 4
    assert made.manifest().counts["rows"] == 5
