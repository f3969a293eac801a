"""The features stage against a stub: shards, selection, resume, what speculators is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from safetensors.numpy import load_file
from stub_server import Capture, StubServer, states_of

from slipstream.artifact import Artifact, claim, quarantine
from slipstream.config import RunConfig
from slipstream.errors import StageFailed
from slipstream.features import shard_stage, store
from slipstream.features.lease import Lease
from slipstream.features.rows import plan_shards
from slipstream.progress import silent
from slipstream.serving import Endpoint

HIDDEN = 128  # of the pocket verifier


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A stub that writes states as wide as the pocket verifier's."""
    with StubServer(hidden=HIDDEN) as server:
        yield server


def rows_of(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Traces of different lengths, the last quarter for validation."""
    rows = []
    for i in range(first, first + count):
        ids = [200 + i, *range(1, 3 + i % 4)]
        mask = [0] + [1] * (len(ids) - 1)
        rows.append({"key": f"k{i:03d}", "input_ids": ids, "loss_mask": mask, "prompt_tokens": 1})
    cut = count - count // 4
    return [row | {"split": "train" if i < cut else "validation"} for i, row in enumerate(rows)]


class Runner:
    """Plans, captures and assembles in one work directory."""

    def __init__(self, root: Path, stub: StubServer, make: Callable[..., RunConfig]) -> None:
        self.root, self.stub, self.make = root, stub, make
        self.lent = 0

    @contextmanager
    def lend(self) -> Iterator[Lease]:
        self.lent += 1
        yield Lease(Endpoint(self.stub.url, "stub"), self.stub.storage)

    def traces(self, rows: list[dict[str, Any]]) -> Artifact:
        """A traces artifact with what this stage reads."""
        content = xxhash.xxh3_128(repr(rows).encode()).hexdigest()
        with claim(self.root, "traces", content) as folder:
            pq.write_table(pa.Table.from_pylist(rows), folder.path / "traces.parquet")
            return folder.commit(version=1, recipe={}, inputs={}, content=content, files=["traces.parquet"])

    def shards(self, traces: Artifact, **features: Any) -> list[Artifact]:
        config = self.make(features={"shards": 3} | features)
        planned = plan_shards(config, traces)
        return [shard_stage.capture_shard(self.root, config, traces, shard, self.lend, silent) for shard in planned]

    def __call__(self, rows: list[dict[str, Any]], **features: Any) -> Artifact:
        traces = self.traces(rows)
        shards = self.shards(traces, **features)
        return store.assemble(self.root, self.make(features={"shards": 3} | features), traces, shards)

    def asked(self) -> list[list[int]]:
        """The token ids of every capture request."""
        return [body["prompt"] for body in self.stub.asked("/v1/completions")]


@pytest.fixture
def run(tmp_path: Path, stub: StubServer, make_config: Callable[..., RunConfig]) -> Runner:
    """A runner in the test's own work directory."""
    return Runner(tmp_path / "work", stub, make_config)


def states(folder: Path, row: int) -> dict[str, np.ndarray]:
    return load_file(folder / "hidden_states" / f"hs_{row}.safetensors")


def test_every_row_has_its_own_states_in_order(run: Runner) -> None:
    rows = rows_of(12)
    made = run(rows)
    for i, row in enumerate(rows):
        sample = states(made.folder, i)
        assert sample["token_ids"].tolist() == row["input_ids"]
        assert np.array_equal(sample["hidden_states"], states_of(row["input_ids"], 4, HIDDEN))
    dataset = datasets.load_from_disk(str(made.folder))
    assert [list(map(int, ids)) for ids in dataset["input_ids"]] == [row["input_ids"] for row in rows]
    assert [list(map(int, mask)) for mask in dataset["loss_mask"]] == [row["loss_mask"] for row in rows]
    assert [int(length) for length in dataset["seq_len"]] == [len(row["input_ids"]) for row in rows]
    counts = made.manifest().counts
    assert (counts["rows"], counts["train"], counts["validation"], counts["lost"]) == (12, 9, 3, 0)
    assert counts["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert made.verify(deep=True) == []


def test_the_index_has_size_and_checksum_of_every_file(run: Runner) -> None:
    made = run(rows_of(8))
    index = pq.read_table(made.folder / "index.parquet").to_pylist()
    assert [entry["trace"] for entry in index] == [f"k{i:03d}" for i in range(8)]
    for entry in index:
        data = (made.folder / "hidden_states" / f"hs_{entry['row']}.safetensors").read_bytes()
        assert (entry["size"], entry["checksum"]) == (len(data), xxhash.xxh3_128(data).hexdigest())


def test_states_are_links_and_not_copies(run: Runner) -> None:
    made = run(rows_of(4))
    assert (made.folder / "hidden_states" / "hs_0.safetensors").stat().st_nlink == 2


def test_a_finished_stage_asks_for_nothing(run: Runner) -> None:
    rows = rows_of(12)
    first = run(rows)
    asked, lent = len(run.asked()), run.lent
    assert run(rows) == first
    assert (len(run.asked()), run.lent) == (asked, lent) == (12, 3)


def test_another_number_of_shards_captures_nothing_again(run: Runner) -> None:
    rows = rows_of(12)
    first = run(rows)
    assert run(rows, shards=2).content == first.content
    assert len(run.asked()) == 12


def test_one_more_trace_is_one_request(run: Runner) -> None:
    run(rows_of(12))
    made = run([*rows_of(12), *(row | {"split": "validation"} for row in rows_of(1, first=50))])
    assert run.asked()[12:] == [[250, 1, 2, 3, 4]]
    assert made.manifest().counts["rows"] == 13


def test_only_what_is_damaged_is_captured_again(run: Runner) -> None:
    rows = rows_of(12)
    first = run(rows)
    damaged = first.folder / "hidden_states" / "hs_5.safetensors"
    data = damaged.read_bytes()
    with damaged.open("r+b") as file:  # the link and the pool's file are one
        file.truncate(100)
    assert run(rows) == first
    assert run.asked()[12:] == [rows[5]["input_ids"]]
    assert damaged.read_bytes() == data
    assert first.verify(deep=True) == []


def planted(path: Path, fault: str, other: Path) -> None:
    """Damages a sample without changing its size."""
    data = bytearray(path.read_bytes())
    if fault == "one flipped bit":
        data[-5] ^= 4
    elif fault == "zeros":
        data[-64:] = bytes(64)
    elif fault == "NaN":
        data[-4:] = np.float32(np.nan).tobytes()
    else:  # two files of equal length that took each other's place
        mine, data = bytes(data), bytearray(other.read_bytes())
        assert len(mine) == len(data)
        other.write_bytes(mine)
    path.write_bytes(data)


@pytest.mark.parametrize("fault", ["one flipped bit", "zeros", "NaN", "swapped"])
def test_damage_of_equal_size_is_found_by_checksums_and_repaired_alone(run: Runner, fault: str) -> None:
    rows = rows_of(12)
    first = run(rows)
    files = {i: first.folder / "hidden_states" / f"hs_{i}.safetensors" for i in (1, 5)}  # both five tokens long
    intact = {i: path.read_bytes() for i, path in files.items()}
    planted(files[5], fault, files[1])
    damaged = [5] if fault != "swapped" else [1, 5]
    assert first.verify() == []
    found = first.verify(deep=True)
    assert [(item.path, item.reason) for item in found] == [
        (f"hidden_states/hs_{i}.safetensors", "checksum differs") for i in damaged
    ]
    aside = quarantine(first.folder, found)
    assert sorted(path.name for path in aside.rglob("*.safetensors")) == [f"hs_{i}.safetensors" for i in damaged]
    assert run(rows) == first
    assert sorted(run.asked()[12:]) == sorted(rows[i]["input_ids"] for i in damaged)
    assert {i: path.read_bytes() for i, path in files.items()} == intact
    assert first.verify(deep=True) == []


def test_a_lost_row_leaves_no_gap(run: Runner) -> None:
    rows = rows_of(12)
    run.stub.on_capture(lambda tokens, number: Capture(status=400) if tokens[0] == 203 else Capture())
    made = run(rows, max_lost_share=0.5)
    kept = [row for row in rows if row["input_ids"][0] != 203]
    for i, row in enumerate(kept):
        assert states(made.folder, i)["token_ids"].tolist() == row["input_ids"]
    assert len(list((made.folder / "hidden_states").iterdir())) == 11
    assert len(datasets.load_from_disk(str(made.folder))) == 11
    assert (made.manifest().counts["train"], made.manifest().counts["lost"]) == (8, 1)
    assert '"k003"' in (made.folder / "lost.jsonl").read_text()


def test_losses_above_the_limit_fail_and_lose_nothing(run: Runner) -> None:
    rows = rows_of(12)
    run.stub.on_capture(lambda tokens, number: Capture(status=400) if tokens[0] == 203 else Capture())
    traces = run.traces(rows)
    with pytest.raises(StageFailed, match=r"1 of \d+ samples of shard 0 .* the first: .*HTTP 400"):
        run.shards(traces)
    asked = len(run.asked())
    run.stub.on_capture(lambda tokens, number: Capture())
    run.shards(traces)
    assert run.asked()[asked] == [203, 1, 2, 3, 4, 5]
    assert len(run.asked()) == 13


def test_content_names_rows_and_recipe_and_not_bytes(run: Runner) -> None:
    rows = rows_of(8)
    first = run(rows)
    other_mask = [row | {"prompt_tokens": 2} for row in rows]
    assert run(other_mask).content != first.content
    assert run(rows, layer_ids=[1, 3, 5]).content != first.content


def test_traces_with_the_same_tokens_share_a_file(run: Runner) -> None:
    rows = rows_of(4)
    twin = rows[0] | {"key": "k000b"}
    made = run([rows[0], twin, *rows[1:]])
    assert made.manifest().counts["rows"] == 5
    assert np.array_equal(states(made.folder, 0)["hidden_states"], states(made.folder, 1)["hidden_states"])
