"""Prompt files: reading, checking, a stable key for each prompt.

A row is a JSON object with `messages` (role and content; a trailing assistant turn is dropped, it is the
verifier's to write) or `prompt` (one user turn), and optionally `id`, `tools` and `kind` (or `domain`).
A bad row is set aside with its file, row, id and reason and the others go on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.digest import digest
from slipstream.errors import InputError

ROLES = frozenset({"system", "user", "assistant", "tool"})


@dataclass(frozen=True)
class Prompt:
    """One prompt.  `key` depends on its content and declared id, not on where it stands."""

    key: str
    id: str | None
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    kind: str

    @property
    def content_key(self) -> str:
        """Equal for prompts that ask the same thing, whatever their ids."""
        return digest([self.messages, self.tools])

    def to_json(self) -> dict[str, Any]:
        """The row that the prompt artifact stores."""
        return {"key": self.key, "id": self.id, "kind": self.kind, "messages": self.messages, "tools": self.tools}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Prompt:
        """The inverse of `to_json`."""
        return Prompt(row["key"], row["id"], tuple(row["messages"]), tuple(row["tools"]), row["kind"])


@dataclass(frozen=True)
class Reject:
    """A row that was set aside: where it stands (row counts from 1) and why."""

    file: str
    row: int
    id: str | None
    reason: str


class BadRow(ValueError):
    """Why a row cannot be a prompt."""


def parse(row: Any) -> Prompt:
    """The prompt in a decoded row; raises BadRow."""
    if not isinstance(row, dict):
        raise BadRow("not a JSON object")
    messages = row.get("messages")
    if messages is None:
        text = row.get("prompt")
        if not isinstance(text, str):
            raise BadRow("neither `messages` nor a `prompt` text")
        messages = [{"role": "user", "content": text}]
    if not isinstance(messages, list) or not messages:
        raise BadRow("`messages` is not a list of turns")
    turns = [_turn(message) for message in messages]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns or turns[-1]["role"] == "system":
        raise BadRow("no user turn to answer")
    declared = row.get("id")
    tools = row.get("tools") or []
    if not isinstance(tools, list):
        raise BadRow("`tools` is not a list")
    name = None if declared is None else str(declared)
    tools = [_without_none(tool) for tool in tools]
    kind = str(row.get("kind") or row.get("domain") or "all")
    try:
        kind.encode()
        key = digest({"id": name, "messages": turns, "tools": tools})
    except UnicodeEncodeError as error:
        raise BadRow("text that is not valid Unicode (half of a surrogate pair)") from error
    except (ValueError, TypeError) as error:
        raise BadRow(f"a value that JSON cannot hold ({error})") from error
    except RecursionError as error:
        raise BadRow("nested too deeply") from error
    return Prompt(key, name, tuple(turns), tuple(tools), kind)


def _turn(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise BadRow(f"a turn without a role of {', '.join(sorted(ROLES))}")
    content = message.get("content")
    if not isinstance(content, str) and not message.get("tool_calls"):
        raise BadRow("a turn whose content is not text")
    if message["role"] == "user" and not str(content).strip():
        raise BadRow("an empty user turn")
    fields = ("role", "content", "name", "tool_calls", "tool_call_id")
    turn = {key: _without_none(message[key]) for key in fields if message.get(key) is not None}
    return {"content": None, **turn} if "content" in message else turn


def _without_none(value: Any) -> Any:
    """`value` without the None that Parquet and saved data sets put where a nested field is missing."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                yield number, BadRow("not UTF-8")
            except ValueError as error:
                yield number, BadRow(f"not JSON ({error})")
            except RecursionError:
                yield number, BadRow("nested too deeply")


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet as pq

    number = 0
    for batch in pq.ParquetFile(path).iter_batches(1024):
        for row in batch.to_pylist():
            number += 1
            yield number, {key: value for key, value in row.items() if value is not None}


def _dataset(path: Path) -> Iterator[tuple[int, Any]]:
    import datasets

    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        raise InputError(f"{path}: holds several splits ({', '.join(loaded)}); name one of its folders")
    for number, row in enumerate(loaded, 1):
        yield number, {key: value for key, value in row.items() if value is not None}


def rows(source: str) -> Iterator[tuple[int, Any]]:
    """Row number and decoded row (or the BadRow it is) of a prompt source; raises InputError when unreadable."""
    path = Path(source)
    if not path.exists():
        raise InputError(f"{source}: no such prompt file; set prompts.sources to files that exist here")
    try:
        if path.is_dir():
            yield from _dataset(path)
        elif path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix in {".jsonl", ".json"}:
            yield from _jsonl(path)
        else:
            raise InputError(f"{source}: unknown kind of prompt file; use .jsonl, .parquet or a saved data set folder")
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{source}: unreadable prompt file ({type(error).__name__}: {error})") from error


def read(sources: list[str]) -> tuple[list[Prompt], list[Reject], int]:
    """Prompts of all sources in key order, the rejected rows, and how many rows repeated another's content.

    Raises InputError for a source that cannot be read and for two different prompts under one id.
    """
    by_content: dict[str, Prompt] = {}
    by_id: dict[str, tuple[str, str]] = {}
    rejects: list[Reject] = []
    repeated = 0
    for source in sources:
        for number, row in rows(source):
            declared = str(row["id"]) if isinstance(row, dict) and row.get("id") is not None else None
            try:
                if isinstance(row, BadRow):
                    raise row
                prompt = parse(row)
            except BadRow as error:
                rejects.append(Reject(source, number, declared, str(error)))
                continue
            content = prompt.content_key
            if prompt.id is not None:
                where, other = by_id.setdefault(prompt.id, (f"{source} row {number}", content))
                if other != content:
                    raise InputError(f"{source}: row {number} has id {prompt.id} like {where}, but asks something else")
            if (known := by_content.get(content)) is not None:
                repeated += 1
                if known.key <= prompt.key:
                    continue
            by_content[content] = prompt
    return sorted(by_content.values(), key=lambda p: p.key), rejects, repeated


def source_digest(source: str) -> str:
    """A digest of a source's bytes: a copy elsewhere is the same source, other bytes under its name are not."""
    from slipstream.artifact import checksum

    path = Path(source)
    if not path.exists():
        raise InputError(f"{source}: no such prompt file; set prompts.sources to files that exist here")
    try:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        return digest([[p.name, checksum(p)] for p in files] if path.is_dir() else checksum(path))
    except OSError as error:
        raise InputError(f"{source}: unreadable prompt file ({error.strerror or error})") from error
