"""The cache policy against the real Prefect: a hit only while the artifact verifies, transient failures retried."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect import flow, task

from slipstream.artifact import Artifact, claim, find, stage_key
from slipstream.errors import InputError, StageFailed, TransientError
from tasks.retries import is_transient
from tasks.stage import options

pytestmark = pytest.mark.usefixtures("results")


def key(inputs: dict) -> str:
    """The toy stage's key."""
    return stage_key("toy", 1, {"text": inputs["text"]}, {})


calls: list[str] = []


@task(**options("toy", key))
def toy(folder: str, text: str) -> Artifact:
    """Writes one file."""
    calls.append(text)
    if text == "wrong":
        raise InputError("wrong input")
    name = key({"text": text})
    with claim(Path(folder), "toy", name) as writer:
        if (done := find(Path(folder), "toy", name)) is not None:
            return done
        (writer.path / "out.txt").write_text(text)
        return writer.commit(version=1, recipe={"text": text}, inputs={}, content=text * 4, files=["out.txt"])


@flow(persist_result=False)
def one(folder: str, text: str) -> Artifact:
    """A flow of the one stage."""
    return toy(folder, text)


def test_the_same_inputs_execute_once_across_flow_runs(tmp_path: Path) -> None:
    calls.clear()
    first, second = one(str(tmp_path), "a"), one(str(tmp_path), "a")
    assert calls == ["a"]
    assert first == second
    assert (second.folder / "out.txt").read_text() == "a"


def test_other_inputs_execute(tmp_path: Path) -> None:
    calls.clear()
    one(str(tmp_path), "a")
    one(str(tmp_path), "b")
    assert calls == ["a", "b"]


@pytest.mark.parametrize("damage", ["missing file", "cut file", "no manifest", "no folder"])
def test_damage_is_a_miss_and_is_repaired(tmp_path: Path, damage: str) -> None:
    calls.clear()
    made = one(str(tmp_path), "text")
    file = made.folder / "out.txt"
    if damage == "missing file":
        file.unlink()
    elif damage == "cut file":
        file.write_text("te")
    elif damage == "no manifest":
        (made.folder / "manifest.json").unlink()
    else:
        made.folder.rename(tmp_path / "elsewhere")
    again = one(str(tmp_path), "text")
    assert calls == ["text", "text"]
    assert again.content == made.content
    assert file.read_text() == "text"
    one(str(tmp_path), "text")
    assert calls == ["text", "text"], "the repaired artifact is a hit again"


def test_a_cut_result_record_is_a_miss(tmp_path: Path) -> None:
    calls.clear()
    one(str(tmp_path), "a")
    for record in (tmp_path / "results").rglob("toy-*"):
        record.write_bytes(record.read_bytes()[:20])
    one(str(tmp_path), "a")
    assert calls == ["a", "a"]


def test_permanent_failures_are_tried_once(tmp_path: Path) -> None:
    calls.clear()
    with pytest.raises(InputError, match="wrong input"):
        one(str(tmp_path), "wrong")
    assert calls == ["wrong"]


def test_only_transient_failures_are_tried_again() -> None:
    tries: list[int] = []

    @task(retries=2, retry_delay_seconds=[0, 0], retry_condition_fn=is_transient, persist_result=False)
    def fails(error: type[Exception], times: int) -> int:
        tries.append(1)
        if len(tries) <= times:
            raise error("no")
        return len(tries)

    @flow(persist_result=False)
    def attempt(error: str, times: int) -> int:
        return fails({"transient": TransientError, "stage": StageFailed}[error], times)

    assert attempt("transient", 2) == 3
    tries.clear()
    with pytest.raises(StageFailed):
        attempt("stage", 1)
    assert len(tries) == 1
