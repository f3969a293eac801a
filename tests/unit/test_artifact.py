"""Stage folders: keys, manifest, verification, the lock."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from slipstream import artifact, atomic
from slipstream.artifact import Artifact
from slipstream.errors import Damaged

HOLD = """
import sys, time
from pathlib import Path
from slipstream.artifact import claim

with claim(Path(sys.argv[1]), "stage", "key") as folder:
    print("held", flush=True)
    time.sleep(60)
"""


def commit(workdir: Path, contents: dict[str, bytes], **changes: Any) -> Artifact:
    """A finished folder `stage/key` with these files."""
    with artifact.claim(workdir, "stage", "key") as folder:
        folder.reopen()
        for name, data in contents.items():
            path = folder.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        given = {"version": 1, "recipe": {"a": 1}, "inputs": {"x": "y"}, "content": "c", "files": list(contents)}
        return folder.commit(**given | changes)


def test_the_key_is_the_hash_of_stage_version_recipe_and_inputs() -> None:
    text = b'{"inputs":{"prompts":"p"},"recipe":{"size":4},"stage":"s","version":2}'
    key = artifact.stage_key("s", 2, {"size": 4}, {"prompts": "p"})
    assert key == hashlib.sha256(text).hexdigest()[:32]


def test_every_ingredient_changes_the_key() -> None:
    keys = [
        artifact.stage_key("s", 1, {"a": 1}, {"x": "1"}),
        artifact.stage_key("t", 1, {"a": 1}, {"x": "1"}),
        artifact.stage_key("s", 2, {"a": 1}, {"x": "1"}),
        artifact.stage_key("s", 1, {"a": 2}, {"x": "1"}),
        artifact.stage_key("s", 1, {"b": 1}, {"x": "1"}),
        artifact.stage_key("s", 1, {"a": 1}, {"x": "2"}),
        artifact.stage_key("s", 1, {"a": 1}, {"y": "1"}),
    ]
    assert len(set(keys)) == len(keys)


def test_the_manifest_lists_size_and_xxh3_of_every_file(tmp_path: Path) -> None:
    files = {"a.bin": b"abc", "sub/b.bin": bytes(5_000_000), "empty": b""}
    made = commit(tmp_path, files)
    manifest = json.loads((tmp_path / "stage" / "key" / "manifest.json").read_text())
    assert manifest["files"] == {
        name: {"size": len(data), "checksum": xxhash.xxh3_128(data).hexdigest()} for name, data in files.items()
    }
    assert manifest["files"]["empty"]["checksum"] == "99aa06d3014798d86001c324468d497f"  # published, XXH3-128 of ""
    assert (made.stage, made.key, made.content) == ("stage", "key", "c")
    assert manifest["started"] <= manifest["ended"]
    assert manifest["tools"]["pyarrow"]


def test_a_folder_is_unfinished_until_the_manifest_is_there(tmp_path: Path) -> None:
    with artifact.claim(tmp_path, "stage", "key") as folder:
        (folder.path / "a").write_bytes(b"abc")
        assert folder.complete() is None
        assert artifact.find(tmp_path, "stage", "key") is None
        folder.commit(version=1, recipe={}, inputs={}, content="c", files=["a"])
        assert folder.complete() is not None


def test_the_manifest_is_written_after_every_file_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(artifact.atomic, "fsync_file", lambda path: events.append(path.name))
    monkeypatch.setattr(artifact.atomic, "fsync_folder", lambda path: events.append(path.name))
    monkeypatch.setattr(artifact.atomic, "write_json", lambda path, value: events.append(path.name))
    with pytest.raises(Damaged):
        commit(tmp_path, {"a": b"1", "sub/b": b"2"})
    assert events == ["a", "b", "key", "sub", "manifest.json"]


def test_reopen_takes_the_manifest_away_and_keeps_the_files(tmp_path: Path) -> None:
    commit(tmp_path, {"a": b"abc"})
    with artifact.claim(tmp_path, "stage", "key") as folder:
        (folder.path / ".a.7.tmp").touch()
        folder.reopen()
        assert artifact.find(tmp_path, "stage", "key") is None
        assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "a"]


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, 2)


def grow(path: Path) -> None:
    path.write_bytes(b"abcd")


def flip(path: Path) -> None:
    path.write_bytes(b"abd")


@pytest.mark.parametrize(
    ("harm", "cheap", "deep"),
    [
        (remove, "missing", "missing"),
        (truncate, "2 bytes instead of 3", "2 bytes instead of 3"),
        (grow, "4 bytes instead of 3", "4 bytes instead of 3"),
        (flip, None, "checksum differs"),
    ],
)
def test_verification(tmp_path: Path, harm: Callable[[Path], None], cheap: str | None, deep: str) -> None:
    made = commit(tmp_path, {"a": b"abc", "b": b"abc"})
    assert made.verify(deep=True) == []
    harm(made.folder / "a")
    assert [(d.path, d.reason) for d in made.verify()] == ([] if cheap is None else [("a", cheap)])
    assert [(d.path, d.reason) for d in made.verify(deep=True)] == [("a", deep)]
    assert (artifact.find(tmp_path, "stage", "key") is None) == (cheap is not None)


def test_verification_tells_its_progress(tmp_path: Path) -> None:
    commit(tmp_path, {"a": b"1", "b": b"2"})
    seen: list[tuple[int, int]] = []
    artifact.verify(tmp_path / "stage" / "key", on_file=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stage": "stage"}', "\x00\xff"])
def test_an_unreadable_manifest_is_damage(tmp_path: Path, text: str) -> None:
    made = commit(tmp_path, {"a": b"abc"})
    (made.folder / "manifest.json").write_text(text)
    assert [damage.path for damage in made.verify()] == ["manifest.json"]
    assert artifact.find(tmp_path, "stage", "key") is None
    with pytest.raises(Damaged, match=r"manifest\.json"):
        artifact.open_artifact(made.folder)


def test_no_manifest_is_damage(tmp_path: Path) -> None:
    made = commit(tmp_path, {"a": b"abc"})
    (made.folder / "manifest.json").unlink()
    assert "no manifest.json" in made.verify()[0].reason


def test_making_it_again_keeps_key_and_content(tmp_path: Path) -> None:
    first = commit(tmp_path, {"a": b"abc"}, parts={"p": "q"})
    (first.folder / "a").unlink()
    second = commit(tmp_path, {"a": b"abc"}, parts={"p": "q"})
    assert second == first
    assert second.verify(deep=True) == []


def test_a_known_record_spares_reading(tmp_path: Path) -> None:
    record = artifact.FileRecord(size=3, checksum="of the pool")
    made = commit(tmp_path, {"a": b"abc"}, files={"a": record})
    assert made.manifest().files["a"] == record


def hold(workdir: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(workdir)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_writer_waits_and_a_kill_frees_the_folder(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    waiting: list[str] = []
    entered = threading.Event()

    def second() -> None:
        with artifact.claim(tmp_path, "stage", "key", waiting.append):
            entered.set()

    thread = threading.Thread(target=second)
    thread.start()
    try:
        assert not entered.wait(0.3)
        assert len(waiting) == 1
        assert str(tmp_path / "stage" / "key") in waiting[0]
        os.kill(holder.pid, signal.SIGKILL)
        assert entered.wait(5)
    finally:
        holder.kill()
        holder.wait()
        thread.join()


def test_other_keys_do_not_wait(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    started = time.monotonic()
    try:
        with artifact.claim(tmp_path, "stage", "other", pytest.fail):
            assert time.monotonic() - started < 5
    finally:
        holder.kill()
        holder.wait()


def test_an_exception_frees_the_folder(tmp_path: Path) -> None:
    def fail() -> None:
        with artifact.claim(tmp_path, "stage", "key"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with artifact.claim(tmp_path, "stage", "key", pytest.fail):
        pass


def test_damaged_files_are_kept_aside_and_emptied_under_all_their_names(tmp_path: Path) -> None:
    with artifact.claim(tmp_path, "features", "k") as folder:
        (folder.path / "pool").mkdir()
        for name in ("good", "bad"):
            (folder.path / name).write_bytes(name.encode())
        os.link(folder.path / "bad", folder.path / "pool" / "bad")
        made = folder.commit(version=1, recipe={}, inputs={}, content="c", files=["good", "bad", "pool/bad"])
    (made.folder / "bad").write_bytes(b"BAD")
    aside = artifact.quarantine(made.folder, made.verify(deep=True))
    assert aside == tmp_path / "quarantine" / "features" / "k"
    assert (aside / "bad").read_bytes() == b"BAD"
    assert sorted(item.path for item in made.verify()) == ["bad", "pool/bad"]
    assert (made.folder / "good").read_bytes() == b"good"


def test_a_commit_syncs_its_own_folders_and_not_those_of_files_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard lists hundreds of the pool's folders; syncing each again cost as long as the capture."""
    synced: list[Path] = []
    monkeypatch.setattr(atomic, "fsync_folder", synced.append)
    pool = tmp_path / "pool" / "ab"
    pool.mkdir(parents=True)
    (pool / "sample").write_bytes(b"x")
    with artifact.claim(tmp_path, "stage", "key") as folder:
        (folder.path / "sub").mkdir()
        (folder.path / "sub" / "own").write_bytes(b"y")
        elsewhere = os.path.relpath(pool / "sample", folder.path)
        known = {elsewhere: artifact.file_record(pool / "sample"), "sub/own": None}
        made = folder.commit(version=1, recipe={}, inputs={}, content="c", files=known)
    assert pool not in synced
    assert folder.path / "sub" in synced
    assert made.verify(deep=True) == []
