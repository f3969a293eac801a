"""Files appear whole or not at all, also when the writer is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream import atomic

KILLED = """
import os, signal, sys
from pathlib import Path
from slipstream import atomic

target, moment = Path(sys.argv[1]), sys.argv[2]
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if moment == "before fsync":
    atomic.fsync_file = die
elif moment == "before rename":
    atomic.os.replace = die
with atomic.replacing(target) as temporary:
    with temporary.open("wb") as file:
        file.write(b"n" * 1000)
        file.flush()
        if moment == "half written":
            die()
        file.write(b"n" * 1000)
"""


@pytest.mark.parametrize("moment", ["half written", "before fsync", "before rename"])
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_killed_writer_leaves_what_was_there(tmp_path: Path, moment: str, before: bytes | None) -> None:
    target = tmp_path / "file"
    if before is not None:
        target.write_bytes(before)
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), moment], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (target.read_bytes() if target.exists() else None) == before
    assert atomic.sweep(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ([] if before is None else ["file"])


def test_an_exception_leaves_neither_file_nor_leftover(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic.replacing(tmp_path / "file") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_made_and_the_content_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    atomic.write_bytes(path, b"one")
    atomic.write_bytes(path, b"two")
    assert path.read_bytes() == b"two"


def test_json_is_strictly_valid(tmp_path: Path) -> None:
    atomic.write_json(tmp_path / "f.json", {"ü": [1, None]})
    assert json.loads((tmp_path / "f.json").read_bytes()) == {"ü": [1, None]}
    with pytest.raises(ValueError, match="JSON"):
        atomic.write_json(tmp_path / "f.json", {"loss": float("nan")})
    assert json.loads((tmp_path / "f.json").read_bytes()) == {"ü": [1, None]}


def test_sweep_takes_only_leftovers_of_this_folder(tmp_path: Path) -> None:
    (tmp_path / ".hidden").touch()
    (tmp_path / "visible.tmp").touch()
    (tmp_path / ".x.12.tmp").touch()
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / ".y.12.tmp").touch()
    assert atomic.sweep(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".hidden", ".y.12.tmp", "below", "visible.tmp"]
