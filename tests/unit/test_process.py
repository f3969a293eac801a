"""Child processes never outlive their parent, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream import process

# Starts a grandchild (in a session of its own when asked), writes the process ids, then does what it is told.
FAMILY = """
import os, subprocess, sys, time
from pathlib import Path

out, how, then = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=how == "setsid")
(out / "tmpdir").write_text(os.environ["TMPDIR"])
(out / "new").write_text(f"{os.getpid()} {child.pid}")
os.replace(out / "new", out / "pids")
if then == "stay":
    time.sleep(60)
sys.exit(int(then))
"""
PARENT = """
import sys, time
from pathlib import Path
from slipstream import process

process.start(sys.argv[2:], Path(sys.argv[1]) / "log")
time.sleep(60)
"""

DEAF = """
import signal, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""
IMPATIENT = """
import sys
from slipstream import process

sys.exit(process._supervise(int(sys.argv[1]), 0.3, sys.argv[2:]))
"""


def family(folder: Path, how: str = "plain", then: str = "stay") -> list[str]:
    """The command that starts a child with a grandchild."""
    return [sys.executable, "-c", FAMILY, str(folder), how, then]


def pids(folder: Path) -> list[int]:
    """Waits for the ids that the family writes."""
    for _ in range(400):
        if (folder / "pids").exists():
            return [int(pid) for pid in (folder / "pids").read_text().split()]
        time.sleep(0.02)
    raise AssertionError("the family did not start")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(numbers: list[int], within_s: float = 5) -> bool:
    """Whether all of the processes end in time."""
    deadline = time.monotonic() + within_s
    while any(alive(number) for number in numbers):
        if time.monotonic() > deadline:
            for number in numbers:
                if alive(number):
                    os.kill(number, signal.SIGKILL)
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("how", ["plain", "setsid"])
def test_child_and_grandchild_die_with_a_killed_parent(tmp_path: Path, how: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), *family(tmp_path, how)])
    numbers = pids(tmp_path)
    assert all(alive(number) for number in numbers)
    parent.kill()
    parent.wait()
    assert all_gone(numbers)


@pytest.mark.parametrize("how", ["plain", "setsid"])
def test_stop_ends_child_and_grandchild(tmp_path: Path, how: str) -> None:
    child = process.start(family(tmp_path, how), tmp_path / "log")
    numbers = pids(tmp_path)
    assert child.returncode() is None
    child.stop()
    assert not any(alive(number) for number in numbers)
    assert child.returncode() is not None


def test_a_killed_supervisor_takes_child_and_grandchild_along(tmp_path: Path) -> None:
    child = process.start(family(tmp_path), tmp_path / "log")
    numbers = pids(tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while child.returncode() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert child.returncode() == -signal.SIGKILL
    assert all_gone(numbers)


@pytest.mark.parametrize("how", ["plain", "setsid"])
def test_children_left_behind_are_ended_and_the_status_is_kept(tmp_path: Path, how: str) -> None:
    child = process.start(family(tmp_path, how, then="7"), tmp_path / "log")
    assert child.wait(20) == 7
    assert all_gone(pids(tmp_path), within_s=0.5)


def test_a_stubborn_child_is_killed() -> None:
    command = [sys.executable, "-c", IMPATIENT, str(os.getpid()), sys.executable, "-c", DEAF]
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == b"deaf\n"
    below = process.descendants(supervisor.pid)
    assert len(below) == 1
    supervisor.terminate()
    assert supervisor.wait(10) == 128 + signal.SIGTERM
    assert not alive(below[0])


@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("raise SystemExit(3)", 3)])
def test_exit_status(tmp_path: Path, code: str, status: int) -> None:
    assert process.start([sys.executable, "-c", code], tmp_path / "log").wait(20) == status


def test_death_by_signal_is_128_plus_its_number(tmp_path: Path) -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    assert process.start([sys.executable, "-c", code], tmp_path / "log").wait(20) == 137


def test_the_scratch_folder_is_short_and_removed(tmp_path: Path) -> None:
    child = process.start(family(tmp_path, then="0"), tmp_path / "log")
    child.wait(20)
    scratch = Path((tmp_path / "tmpdir").read_text())
    assert len(str(scratch)) < 60
    assert not scratch.exists()


def test_stopping_at_once_leaves_no_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path))
    child = process.start([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    child.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_command_that_does_not_exist_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path))
    child = process.start([str(tmp_path / "nothing")], tmp_path / "log")
    assert child.wait(20) != 0
    assert "FileNotFoundError" in child.complaint()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_output_environment_and_folder(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("earlier\n")
    code = "import os, sys; print(os.environ['WORD'], os.getcwd()); print('loud', file=sys.stderr)"
    process.start([sys.executable, "-c", code], tmp_path / "log", {"WORD": "hello"}, tmp_path).wait(20)
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["earlier", f"hello {tmp_path}", "loud"]


def test_complaint_names_the_exception(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = process.start([sys.executable, "-c", "raise ValueError('too long')"], log)
    child.wait(20)
    with log.open("a") as file:
        file.write("shutting down\n")
    assert child.complaint() == "ValueError: too long"


def test_descendants_are_found_below_any_depth() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 10
        while len(process.descendants(child.pid)) < 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(process.descendants(child.pid)) == 1
        assert child.pid in process.descendants(os.getpid())
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
