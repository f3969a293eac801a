"""Sources of prompts: what is read, what is set aside and why, what names a source."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.config import Source
from slipstream.errors import InputError
from slipstream.traces import sources
from slipstream.traces.prompts import Prompt
from slipstream.traces.sources import Reject, source_digest

ROWS: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "2+2"}], "kind": "sum"},
    {"id": "b", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Prüfe 😀"}]},
    {"id": "c", "messages": [{"role": "user", "content": "x", "name": "ann"}, {"role": "assistant", "content": "old"}]},
]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "adds"}}, {"type": "builtin"}],
    }
]


def read(path: str | Path, **more: Any) -> tuple[list[Prompt], list[Reject]]:
    """The prompts and the rejected rows of a source."""
    found = list(sources.read(Source(path=str(path), **more)))
    return [p for p in found if isinstance(p, Prompt)], [r for r in found if isinstance(r, Reject)]


def write_bytes(path: Path, lines: list[bytes]) -> str:
    """A file of raw lines."""
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def line(text: str, **more: Any) -> bytes:
    """One good row."""
    return json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()


def as_array(path: Path, elements: list[bytes], between: bytes = b",\n ") -> str:
    """A file that is one JSON array."""
    path.write_bytes(b" \n[" + between.join(elements) + b"]\n")
    return str(path)


SURROGATE = rb'{"id":"s2","messages":[{"role":"user","content":"ok \ud800 end"}]}'
NO_UTF8 = b'{"messages":[{"role":"user","content":"\xff\xfe"}]}'


@pytest.mark.parametrize("write", [write_bytes, as_array])
def test_half_a_surrogate_pair_is_set_aside(tmp_path: Path, write: Callable[..., str]) -> None:
    """Field report 1: text that no request can carry costs its own row only."""
    source = write(tmp_path / "p.json", [line("one", id="s1"), SURROGATE, line("three", id="s3")])
    found, rejects = read(source)
    assert [(prompt.id, prompt.file, prompt.row) for prompt in found] == [("s1", source, 1), ("s3", source, 3)]
    assert [(r.file, r.row, r.id) for r in rejects] == [(source, 2, "s2")]
    assert "Unicode" in rejects[0].reason


@pytest.mark.parametrize("write", [write_bytes, as_array])
def test_bytes_that_are_not_utf8_are_set_aside(tmp_path: Path, write: Callable[..., str]) -> None:
    source = write(tmp_path / "p.json", [line("one"), NO_UTF8, line("three")])
    found, rejects = read(source)
    assert [prompt.row for prompt in found] == [1, 3]
    assert rejects == [Reject(source, 2, None, "not UTF-8")]


DEEP = b'{"prompt":"x","tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
DEEP_ID = b'{"prompt":"","id":' + b"[" * 400 + b"]" * 400 + b"}"


@pytest.mark.parametrize("write", [write_bytes, as_array])
@pytest.mark.parametrize(
    "bad",
    [
        rb'{"prompt":"ok","kind":"\ud800"}',
        rb'{"prompt":"ok","id":"\ud800"}',
        b'{"prompt":"ok","tools":[{"x":NaN}]}',
        b'{"prompt":"ok","tools":[{"x":Infinity}]}',
        b'{"prompt":"ok","tools":"[NaN]"}',
        rb'{"prompt":"ok","tools":[{"\ud800":1}]}',
        rb'{"messages":[{"role":"user","content":"ok","name":"\ud800"}]}',
        DEEP,
        DEEP_ID,
        b'{"prompt": }',
    ],
    ids=["kind", "id", "NaN", "Infinity", "NaN in text", "tool key", "name", "nesting", "nested id", "syntax"],
)
def test_no_single_row_stops_the_others(tmp_path: Path, write: Callable[..., str], bad: bytes) -> None:
    found, rejects = read(write(tmp_path / "p.json", [line("one"), bad, line("three")]))
    assert [prompt.row for prompt in found] == [1, 3]
    assert [r.row for r in rejects] == [2]


def test_a_broken_line_is_set_aside_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    source = write_bytes(tmp_path / "p.jsonl", [b'{"prompt": ', b"", b"  ", line("one")])
    found, rejects = read(source)
    assert [prompt.row for prompt in found] == [4]
    assert [(r.row, r.id) for r in rejects] == [(1, None)]
    assert rejects[0].reason.startswith("not JSON")


def test_a_json_file_may_hold_lines_or_one_array(tmp_path: Path) -> None:
    lines = write_bytes(tmp_path / "lines.json", [json.dumps(row).encode() for row in ROWS])
    (tmp_path / "array.json").write_text(json.dumps(ROWS, indent=2, ensure_ascii=False), encoding="utf-8")
    (tmp_path / "compact.json").write_text(json.dumps(ROWS, separators=(",", ":")))
    expected = read(lines)
    assert [prompt.id for prompt in expected[0]] == ["a", "b", "c"]
    assert read(tmp_path / "array.json") == read(tmp_path / "compact.json") == expected
    assert [prompt.row for prompt in read(tmp_path / "array.json")[0]] == [1, 2, 3]


def test_a_line_that_is_an_array_is_a_bad_row_of_a_jsonl_file(tmp_path: Path) -> None:
    found, rejects = read(write_bytes(tmp_path / "p.jsonl", [b"[1, 2]", line("one")]))
    assert len(found) == 1
    assert [(r.row, r.reason) for r in rejects] == [(1, "not a JSON object")]


@pytest.mark.parametrize("text", ['[{"prompt": "x"}', '[{"prompt": "x"}] more', '[{"prompt": "x]', '[{"prompt": "x"]'])
def test_an_array_without_its_end_is_an_unreadable_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "cut.json").write_text(text)
    with pytest.raises(InputError, match=r"cut\.json: unreadable"):
        read(tmp_path / "cut.json")


def test_an_empty_array_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(" [ ]\n")
    assert read(tmp_path / "p.json") == ([], [])


def save(rows: list[dict[str, Any]], folder: Path, kind: str) -> str:
    """The same rows in another kind of source."""
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
        return str(folder / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(folder / "rows")
    return str(folder / "rows")


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
@pytest.mark.parametrize("rows", [ROWS, TOOLS], ids=["turns", "tools"])
def test_other_kinds_of_source_hold_the_same_prompts(
    tmp_path: Path, write_prompts: Callable[..., str], kind: str, rows: list[dict[str, Any]]
) -> None:
    """Columnar files fill what one row lacks and another has with nulls, which must not rename a prompt."""
    expected, _ = read(write_prompts(rows))
    found, rejects = read(save(rows, tmp_path, kind))
    assert found == expected
    assert [prompt.row for prompt in found] == list(range(1, len(rows) + 1))
    assert rejects == []


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_many_rows_in_other_kinds_of_source(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAPPED_BYTES", 500)  # a mapping of some rows each
    rows = [{"prompt": f"p {i}", "id": i} for i in range(1000)]
    found, _ = read(save(rows, tmp_path, kind))
    assert [(prompt.row, prompt.id, prompt.messages[0]["content"]) for prompt in found] == [
        (i + 1, str(i), f"p {i}") for i in range(1000)
    ]


def test_a_split_of_a_data_set_is_named(tmp_path: Path) -> None:
    whole = {name: datasets.Dataset.from_list([{"prompt": f"{name} text"}]) for name in ("train", "test")}
    datasets.DatasetDict(whole).save_to_disk(tmp_path / "d")
    with pytest.raises(InputError, match=r"several splits; set the source's `split` to one of train, test"):
        read(tmp_path / "d")
    with pytest.raises(InputError, match=r"no split dev; .*train, test"):
        read(tmp_path / "d", split="dev")
    assert read(tmp_path / "d", split="test")[0][0].messages[0]["content"] == "test text"


def test_the_domain_of_rows_that_name_none(write_prompts: Callable[..., str]) -> None:
    path = write_prompts(["a", {"prompt": "b", "domain": "code"}, {"prompt": "c", "kind": "k"}])
    assert [prompt.kind for prompt in read(path, domain="math")[0]] == ["math", "code", "k"]
    assert [prompt.kind for prompt in read(path)[0]] == ["all", "code", "k"]


@pytest.mark.parametrize("name", ["missing.jsonl", "broken.parquet", "empty-folder", "notes.txt", "no-folder"])
def test_an_unreadable_source_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match=name):
        read(tmp_path / name)


def test_a_parquet_file_that_is_cut_is_named(tmp_path: Path) -> None:
    path = Path(save(ROWS, tmp_path, "parquet"))
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\0" * (len(data) // 2) + data[4 + len(data) // 2 :])
    with pytest.raises(InputError, match=r"rows\.parquet: unreadable prompt file"):
        read(path)


def test_digest_follows_bytes_not_paths(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", "x"), ("b.jsonl", "x"), ("c.jsonl", "y")):
        (tmp_path / name).write_text(text)
    one, copy, other, missing = (Source(path=str(tmp_path / f"{name}.jsonl")) for name in "abcd")
    assert source_digest(one) == source_digest(copy) != source_digest(other)
    with pytest.raises(InputError, match="no such prompt file"):
        source_digest(missing)


def test_digest_of_a_folder_follows_its_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.arrow").write_bytes(b"x")
    digests = [source_digest(Source(path=str(tmp_path / name))) for name in ("one", "two")]
    (tmp_path / "two" / "data.arrow").write_bytes(b"y")
    assert digests[0] == digests[1] != source_digest(Source(path=str(tmp_path / "two")))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("org/name", True),
        ("HuggingFaceH4/ultrachat_200k", True),
        ("org/name-1.5", True),
        ("name", False),
        ("org/name.jsonl", False),
        ("org/name.parquet", False),
        ("org/name/more", False),
        ("/org/name", False),
        ("./name", False),
        ("../name", False),
        ("~/name", False),
        ("here/there", False),
    ],
)
def test_what_is_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: bool) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "there").mkdir(parents=True)
    assert sources.on_hub(Source(path=path)) is expected


class Hub:
    """Stands in for the Hub: `org/data` is a repository folder of this machine, loaded by datasets itself."""

    def __init__(self, folder: Path, load: Callable[..., Any]) -> None:
        self.folder, self._load = folder, load
        self.calls: list[tuple[Any, ...]] = []

    def write(self, split: str, rows: list[dict[str, Any]]) -> None:
        """One split of the repository."""
        (self.folder / "repository").mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (self.folder / "repository" / f"{split}.jsonl").write_text(text)

    def __call__(self, path: str, subset: str | None, *, split: str, revision: str | None) -> Any:
        self.calls.append((path, subset, split, revision))
        return self._load(str(self.folder / "repository"), split=split, cache_dir=str(self.folder / "cache"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A Hub that knows one data set."""
    made = Hub(tmp_path, datasets.load_dataset)
    monkeypatch.setattr(datasets, "load_dataset", made)
    made.write("train", ROWS)
    made.write("test", [{"messages": [{"role": "user", "content": "other"}]}])
    return made


def test_a_data_set_of_the_hub(hub: Hub, write_prompts: Callable[..., str]) -> None:
    found, rejects = read("org/data")
    expected, _ = read(write_prompts(ROWS))
    assert found == expected
    assert [(prompt.file, prompt.row) for prompt in found] == [("org/data", 1), ("org/data", 2), ("org/data", 3)]
    assert rejects == []
    other, _ = read("org/data", split="test", subset="main", revision="abc", domain="d")
    assert [(prompt.messages[0]["content"], prompt.kind) for prompt in other] == [("other", "d")]
    assert hub.calls == [("org/data", None, "train", None), ("org/data", "main", "test", "abc")]


def test_digest_of_a_hub_data_set_follows_its_content(hub: Hub, tmp_path: Path) -> None:
    first = source_digest(Source(path="org/data"))
    assert source_digest(Source(path="org/other")) == first
    assert source_digest(Source(path="org/data", split="train")) == first
    assert source_digest(Source(path="org/data", split="test")) != first
    assert source_digest(Source(path="org/data", split="train[:1]")) != first
    hub.write("train", [*ROWS, {"messages": [{"role": "user", "content": "one more"}]}])
    assert source_digest(Source(path="org/data")) != first


def test_digest_of_a_data_set_that_is_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for texts in (["a", "b"], ["a", "b"], ["a", "c"]):
        held = datasets.Dataset.from_list([{"prompt": text} for text in texts])
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, held=held, **__: held)
        digests.append(source_digest(Source(path="org/data")))
        assert [prompt.messages[0]["content"] for prompt in read("org/data")[0]] == texts
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("action", [read, lambda path: source_digest(Source(path=path))], ids=["read", "digest"])
def test_a_data_set_that_is_neither_cached_nor_reachable(action: Callable[[str], Any]) -> None:
    """The tests are offline: this is datasets' own refusal."""
    with pytest.raises(InputError, match=r"no-such-org/no-such-data: no such file here.*download") as caught:
        action("no-such-org/no-such-data")
    assert "\n" not in str(caught.value)


def test_prompts_know_where_they_stand(tmp_path: Path) -> None:
    source = write_bytes(tmp_path / "p.jsonl", [b"", line("one"), line("two")])
    found, _ = read(source)
    assert [(prompt.file, prompt.row) for prompt in found] == [(source, 2), (source, 3)]
    assert replace(found[0], row=9).key == found[0].key
