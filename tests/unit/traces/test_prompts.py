"""Prompt files: what is read, what is set aside and why, what names a prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.errors import InputError
from slipstream.traces import prompts
from slipstream.traces.prompts import BadRow, Prompt

ROWS: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "2+2"}], "kind": "sum"},
    {"id": "b", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Prüfe 😀"}]},
    {"id": "c", "messages": [{"role": "user", "content": "x", "name": "ann"}, {"role": "assistant", "content": "old"}]},
]


def write_bytes(path: Path, lines: list[bytes]) -> str:
    """A file of raw lines."""
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def line(text: str, **more: Any) -> bytes:
    """One good row."""
    return json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()


def test_half_a_surrogate_pair_is_set_aside(tmp_path: Path) -> None:
    bad = rb'{"id":"s2","messages":[{"role":"user","content":"ok \ud800 end"}]}'
    source = write_bytes(tmp_path / "p.jsonl", [line("one", id="s1"), bad, line("three", id="s3")])
    found, rejects, repeated = prompts.read([source])
    assert sorted(str(prompt.id) for prompt in found) == ["s1", "s3"]
    assert [(r.file, r.row, r.id) for r in rejects] == [(source, 2, "s2")]
    assert "Unicode" in rejects[0].reason
    assert repeated == 0


def test_bytes_that_are_not_utf8_are_set_aside(tmp_path: Path) -> None:
    bad = b'{"messages":[{"role":"user","content":"\xff\xfe"}]}'
    source = write_bytes(tmp_path / "p.jsonl", [line("one"), bad, line("three")])
    found, rejects, _ = prompts.read([source])
    assert len(found) == 2
    assert [(r.row, r.reason) for r in rejects] == [(2, "not UTF-8")]


DEEP = b'{"prompt":"x","tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "bad",
    [
        rb'{"prompt":"ok","kind":"\ud800"}',
        rb'{"prompt":"ok","id":"\ud800"}',
        b'{"prompt":"ok","tools":[{"x":NaN}]}',
        b'{"prompt":"ok","tools":[{"x":Infinity}]}',
        rb'{"prompt":"ok","tools":[{"\ud800":1}]}',
        rb'{"messages":[{"role":"user","content":"ok","name":"\ud800"}]}',
        DEEP,
    ],
    ids=["kind", "id", "NaN", "Infinity", "tool key", "name", "nesting"],
)
def test_no_single_row_stops_the_others(tmp_path: Path, bad: bytes) -> None:
    source = write_bytes(tmp_path / "p.jsonl", [line("one"), bad, line("three")])
    found, rejects, _ = prompts.read([source])
    assert len(found) == 2
    assert [r.row for r in rejects] == [2]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "not a JSON object"),
        ({}, "neither `messages` nor a `prompt` text"),
        ({"prompt": 7}, "neither `messages` nor a `prompt` text"),
        ({"messages": []}, "not a list of turns"),
        ({"messages": "hi"}, "not a list of turns"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "without a role"),
        ({"messages": ["x"]}, "without a role"),
        ({"messages": [{"role": "user", "content": None}]}, "not text"),
        ({"messages": [{"role": "user", "content": 5}]}, "not text"),
        ({"prompt": " \n"}, "empty user turn"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user turn"),
        ({"prompt": "x", "tools": {"a": 1}}, "`tools` is not a list"),
    ],
)
def test_why_a_row_is_no_prompt(row: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        prompts.parse(row)


def test_a_broken_line_is_set_aside_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    source = write_bytes(tmp_path / "p.jsonl", [b'{"prompt": ', b"", b"  ", line("one")])
    found, rejects, _ = prompts.read([source])
    assert len(found) == 1
    assert [(r.row, r.id) for r in rejects] == [(1, None)]
    assert rejects[0].reason.startswith("not JSON")


def test_prompt_text_is_one_user_turn() -> None:
    assert prompts.parse({"prompt": "hi"}).messages == ({"role": "user", "content": "hi"},)


def test_the_verifier_answers_last_so_a_trailing_answer_is_dropped() -> None:
    roles = ("user", "assistant", "user")
    turns = [{"role": role, "content": f"turn {i}"} for i, role in enumerate(roles)]
    answered = prompts.parse({"messages": [*turns, {"role": "assistant", "content": "x"}]})
    assert list(answered.messages) == turns
    assert answered.content_key == prompts.parse({"messages": turns}).content_key


def test_the_key_is_the_hash_of_id_turns_and_tools() -> None:
    text = '{"id":"7","messages":[{"content":"hi","role":"user"}],"tools":[]}'
    row = {"id": 7, "messages": [{"role": "user", "content": "hi"}], "kind": "k", "source": "ignored"}
    prompt = prompts.parse(row)
    assert prompt.key == hashlib.sha256(text.encode()).hexdigest()[:32]
    assert (prompt.id, prompt.kind) == ("7", "k")
    assert prompts.parse({**row, "kind": "other"}).key == prompt.key
    assert prompts.parse({**row, "id": 8}).key != prompt.key
    assert prompts.parse({**row, "id": 8}).content_key == prompt.content_key
    assert prompts.parse({**row, "tools": [{"name": "f"}]}).content_key != prompt.content_key


def test_order_of_rows_and_files_does_not_matter(write_prompts: Callable[..., str]) -> None:
    texts = [f"prompt {i}" for i in range(20)]
    whole = prompts.read([write_prompts(texts)])[0]
    turned = prompts.read([write_prompts(texts[::-1][:7], "a.jsonl"), write_prompts(texts[:13][::-1], "b.jsonl")])[0]
    assert turned == whole
    assert [prompt.key for prompt in whole] == sorted(prompt.key for prompt in whole)


def test_repeated_rows_count_and_stand_once(write_prompts: Callable[..., str]) -> None:
    rows = [{"id": "b", "prompt": "x"}, {"id": "a", "prompt": "x"}, {"prompt": "x"}, {"prompt": "y"}]
    found, rejects, repeated = prompts.read([write_prompts(rows)])
    assert (sorted(p.messages[0]["content"] for p in found), rejects, repeated) == (["x", "y"], [], 2)
    again, _, _ = prompts.read([write_prompts(rows[::-1], "turned.jsonl")])
    assert again == found


def test_one_id_for_two_prompts_is_refused(write_prompts: Callable[..., str]) -> None:
    one = write_prompts([{"id": 1, "prompt": "x"}], "1.jsonl")
    two = write_prompts([{"id": "1", "prompt": "y"}], "2.jsonl")
    with pytest.raises(InputError, match=r"2\.jsonl: row 1 has id 1 like .*1\.jsonl row 1"):
        prompts.read([one, two])


def save(rows: list[dict[str, Any]], folder: Path, kind: str) -> str:
    """The same rows in another kind of source."""
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
        return str(folder / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(folder / "rows")
    return str(folder / "rows")


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_other_kinds_of_source_hold_the_same_prompts(
    tmp_path: Path, write_prompts: Callable[..., str], kind: str
) -> None:
    """Columnar files fill what one row lacks and another has with nulls, which must not rename a prompt."""
    expected = prompts.read([write_prompts(ROWS)])
    found = prompts.read([save(ROWS, tmp_path, kind)])
    assert found == expected
    assert len(found[0]) == 3


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_plain_texts_in_other_kinds_of_source(tmp_path: Path, write_prompts: Callable[..., str], kind: str) -> None:
    rows = [{"prompt": f"p {i}", "id": i} for i in range(5)]
    assert prompts.read([save(rows, tmp_path, kind)]) == prompts.read([write_prompts(rows)])


def test_a_dataset_with_several_splits_is_refused(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list([{"prompt": "x"}])
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(tmp_path / "d")
    with pytest.raises(InputError, match="train, test"):
        prompts.read([str(tmp_path / "d")])


@pytest.mark.parametrize("name", ["missing.jsonl", "broken.parquet", "empty-folder", "notes.txt"])
def test_an_unreadable_source_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match=name):
        prompts.read([str(tmp_path / name)])


def test_digest_follows_bytes_not_paths(tmp_path: Path) -> None:
    one, copy, other = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    one.write_text("x")
    copy.write_text("x")
    other.write_text("y")
    assert prompts.source_digest(str(one)) == prompts.source_digest(str(copy)) != prompts.source_digest(str(other))
    with pytest.raises(InputError, match="no such prompt file"):
        prompts.source_digest(str(tmp_path / "d.jsonl"))


def test_digest_of_a_folder_follows_its_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.arrow").write_bytes(b"x")
    digests = [prompts.source_digest(str(tmp_path / name)) for name in ("one", "two")]
    (tmp_path / "two" / "data.arrow").write_bytes(b"y")
    assert digests[0] == digests[1] != prompts.source_digest(str(tmp_path / "two"))


def test_stored_form_round_trip() -> None:
    prompt = prompts.parse({"id": "a", "messages": ROWS[1]["messages"], "tools": [{"name": "f"}], "domain": "d"})
    assert Prompt.from_json(json.loads(json.dumps(prompt.to_json()))) == prompt
    assert prompt.kind == "d"
