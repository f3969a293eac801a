"""traces.parquet: schema, values, row groups, bytes, and that it appears whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from slipstream.artifact import Artifact
from slipstream.traces import table
from slipstream.traces.prompts import Prompt
from slipstream.traces.trace import REBUILT, Trace

PROMPT = Prompt(key="k", id=None, messages=({"role": "user", "content": "u"},), tools=(), kind="math")
CALL = {"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}
TYPES = {
    "key": "string",
    "split": "string",
    "kind": "string",
    "turn": "int32",
    "input_ids": "list<element: int32>",
    "loss_mask": "list<element: int8>",
    "prompt_tokens": "int32",
    "think_end": "int32",
    "finish_reason": "string",
    "thinking": "string",
    "answer": "string",
    "tool_calls": "string",
    "sampling": "string",
    "ids": "string",
}


def trace(key: str = "k", prompt: int = 2, output: int = 3, **more: Any) -> Trace:
    """A trace of so many tokens."""
    fields: dict[str, Any] = {"finish_reason": "stop", "thinking": "hm", "answer": "4"}
    return Trace(key, tuple(range(prompt)), tuple(range(100, 100 + output)), **fields | more)


def write(folder: Path, traces: list[Trace]) -> Path:
    """A table of these rows, all for training."""
    with table.writing(folder) as writer:
        for made in traces:
            writer.add("train", PROMPT, made, None)
    return folder / table.FILE


def artifact(folder: Path) -> Artifact:
    """The folder as a stage's output."""
    return Artifact(path=str(folder), stage="traces", key="k", content="c")


def group_rows(path: Path) -> list[int]:
    """Rows of each row group."""
    metadata = pq.read_metadata(path)
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def test_the_columns_and_their_types(tmp_path: Path) -> None:
    schema = pq.read_schema(write(tmp_path, [trace()]))
    assert {field.name: str(field.type) for field in schema} == TYPES
    assert list(schema.names) == list(TYPES)
    assert schema.metadata[b"slipstream_schema"] == b"2"


def test_values_by_hand(tmp_path: Path) -> None:
    full = Trace("a", (1, 2, 3), (10, 11, 2), "tool_calls", "hm", None, 1, (CALL,), {"top_p": 1.0, "seed": 5}, REBUILT)
    plain = Trace("b", (7,), (8,), "length", None, "4")
    with table.writing(tmp_path) as writer:
        writer.add("train", PROMPT, full, 1)
        writer.add("validation", PROMPT, plain, None)
    assert pq.read_table(tmp_path / table.FILE).to_pylist() == [
        {
            "key": "a",
            "split": "train",
            "kind": "math",
            "turn": 1,
            "input_ids": [1, 2, 3, 10, 11, 2],
            "loss_mask": [0, 0, 0, 1, 1, 1],
            "prompt_tokens": 3,
            "think_end": 4,
            "finish_reason": "tool_calls",
            "thinking": "hm",
            "answer": None,
            "tool_calls": json.dumps([CALL]),
            "sampling": '{"seed": 5, "top_p": 1.0}',
            "ids": "rebuilt",
        },
        {
            "key": "b",
            "split": "validation",
            "kind": "math",
            "turn": 0,
            "input_ids": [7, 8],
            "loss_mask": [0, 1],
            "prompt_tokens": 1,
            "think_end": -1,
            "finish_reason": "length",
            "thinking": None,
            "answer": "4",
            "tool_calls": None,
            "sampling": "{}",
            "ids": "server",
        },
    ]


def test_think_end_points_at_the_closing_token(tmp_path: Path) -> None:
    close = 505
    made = Trace("a", (1, close), (close, 7), "stop", None, "4")
    with table.writing(tmp_path) as writer:
        writer.add("train", PROMPT, made, made.boundary(close))
    (row,) = table.read(artifact(tmp_path), ["input_ids", "think_end"])
    assert row["think_end"] == 2
    assert row["input_ids"][row["think_end"]] == close


def test_ids_as_large_as_a_vocabulary_gets(tmp_path: Path) -> None:
    made = Trace("a", (163_839,), (2**31 - 1,), "stop", None, None)
    write(tmp_path, [made])
    assert [row["input_ids"] for row in table.read(artifact(tmp_path), ["input_ids"])] == [[163_839, 2**31 - 1]]


def test_text_that_utf_8_cannot_hold_does_not_stop_the_table(tmp_path: Path) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "\ud83d"}}
    write(tmp_path, [trace(thinking="hm \ud83d ü", answer="4 \udc00", tool_calls=(call,), sampling={"stop": "\ud83d"})])
    (row,) = table.read(artifact(tmp_path), ["thinking", "answer", "tool_calls", "input_ids"])
    assert (row["thinking"], row["answer"]) == ("hm ? ü", "4 ?")
    assert json.loads(row["tool_calls"]) == [call]
    assert row["input_ids"] == [0, 1, 100, 101, 102]


def test_row_groups_are_bounded_by_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "GROUP_TOKENS", 20)
    path = write(tmp_path, [trace(prompt=2, output=5) for _ in range(7)])  # 7, 14, 21: three rows reach 20
    assert group_rows(path) == [3, 3, 1]


def test_a_row_longer_than_a_group_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "GROUP_TOKENS", 20)
    assert group_rows(write(tmp_path, [trace(output=50), trace(output=50), trace()])) == [1, 1, 1]


def test_row_groups_are_bounded_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "GROUP_ROWS", 4)
    assert group_rows(write(tmp_path, [trace() for _ in range(9)])) == [4, 4, 1]


def test_groups_that_fill_exactly_leave_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "GROUP_ROWS", 4)
    assert group_rows(write(tmp_path, [trace() for _ in range(8)])) == [4, 4]


def test_two_writers_of_the_same_rows_write_the_same_bytes(tmp_path: Path) -> None:
    rows = [trace(f"k{i}", i % 5, 1 + i % 7, thinking="hm" * i, sampling={"b": 1, "a": 2}) for i in range(200)]
    again = [trace(f"k{i}", i % 5, 1 + i % 7, thinking="hm" * i, sampling={"a": 2, "b": 1}) for i in range(200)]
    assert write(tmp_path / "one", rows).read_bytes() == write(tmp_path / "two", again).read_bytes()


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    with table.writing(tmp_path) as writer:
        writer.add("train", PROMPT, trace(), None)
        writer.flush()
        assert not (tmp_path / table.FILE).exists()
    assert [path.name for path in tmp_path.iterdir()] == [table.FILE]


def test_an_error_inside_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> None:
        with table.writing(tmp_path) as writer:
            writer.add("train", PROMPT, trace(), None)
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert list(tmp_path.iterdir()) == []


def test_an_error_inside_keeps_the_table_of_before(tmp_path: Path) -> None:
    before = write(tmp_path, [trace("old")]).read_bytes()
    with pytest.raises(KeyError), table.writing(tmp_path):
        raise KeyError
    assert (tmp_path / table.FILE).read_bytes() == before


def test_no_rows_are_an_empty_table(tmp_path: Path) -> None:
    write(tmp_path, [])
    assert list(table.read(artifact(tmp_path), ["key"])) == []
    assert pq.read_schema(tmp_path / table.FILE).names == list(TYPES)


def test_reading_gives_the_rows_in_order_and_only_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "GROUP_ROWS", 100)
    write(tmp_path, [trace(f"k{i}", turn=i % 3) for i in range(700)])
    rows = list(table.read(artifact(tmp_path), ["turn", "key"]))
    assert rows == [{"key": f"k{i}", "turn": i % 3} for i in range(700)]
