"""Child processes that never outlive their parent: a small supervisor between the two.

`start(command)` runs `python -m slipstream.process <parent pid> <scratch folder> <grace in s> command…`.  The
supervisor leads a session of its own, adopts orphans (PR_SET_CHILD_SUBREAPER), and ends everything below it with
SIGTERM, after a grace period with SIGKILL, as soon as

* the parent is gone, however it died (a pidfd tells; a parent-death signal would not do: it follows
  the creating thread, which in a task runner ends early, and grandchildren do not inherit it), or
* it is asked to by SIGTERM or SIGINT, or
* the command itself has ended and left children behind.

Its exit status is the command's (128 + n for signal n).  A kill -9 of the supervisor takes the command along, and what
that had started ends as soon as the parent asks for the status.  The command's TMPDIR is a folder with a short name (a
socket's path may have 107 characters) that the supervisor removes at the end.  Linux only.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

GRACE_S = 10.0
EXCEPTION = re.compile(r"\b\w+(Error|Exception|Failed|Interrupt|Input)\b.*:")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Process:
    """A supervised command and its descendants."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path, scratch: str, grace_s: float = GRACE_S) -> None:
        self._popen, self.log, self._scratch, self._grace_s = popen, log, scratch, grace_s
        self.pid = popen.pid

    def returncode(self) -> int | None:
        """The command's exit status, or None while it runs."""
        status = self._popen.poll()
        if status is not None:
            self._clear(status)
        return status

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; raises subprocess.TimeoutExpired."""
        status = self._popen.wait(timeout)
        self._clear(status)
        return status

    def stop(self) -> None:
        """Ends the command and everything it started; returns when all of it is gone."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(self._grace_s + 10)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._clear(self._popen.returncode)

    def _clear(self, status: int) -> None:
        """Ends and removes what a supervisor that was killed could not: its session's processes, the scratch folder."""
        if status == -signal.SIGKILL:
            _signal_all(_session(self.pid), signal.SIGKILL)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def complaint(self) -> str:
        """The last line of the log that names an exception, else its last line."""
        try:
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            return "no log"
        named = [line for line in lines if EXCEPTION.search(line) and "EngineDeadError" not in line]
        return (named or lines or ["empty log"])[-1][:500]


def start(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    grace_s: float = GRACE_S,
) -> Process:
    """Starts `command` under a supervisor; stdout and stderr are appended to `log`.

    `env` is added to this process's environment; `grace_s` are the seconds from SIGTERM to SIGKILL.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix="slipstream-")
    supervisor = [sys.executable, "-m", "slipstream.process", str(os.getpid()), scratch, str(grace_s), *command]
    try:
        with log.open("ab") as output:
            popen = subprocess.Popen(
                supervisor,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": scratch, **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return Process(popen, log, scratch, grace_s)


def descendants(root: int) -> list[int]:
    """Process ids of everything below `root`, read from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue
        parent = int(stat.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    todo = [root]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def _session(leader: int) -> list[int]:
    """Process ids of the session that `leader` began, itself apart."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == leader:
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[3]) == leader:
            found.append(int(entry))
    return found


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue
    except ChildProcessError:
        return


def _end_descendants(grace_s: float) -> None:
    me = os.getpid()
    _signal_all(descendants(me), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        _reap()
        if not descendants(me):
            return
        time.sleep(0.05)
    while left := descendants(me):
        _signal_all(left, signal.SIGKILL)
        time.sleep(0.05)
        _reap()


def _die_with_supervisor() -> None:
    """Runs in the command before exec: even a kill -9 of the supervisor ends it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _supervise(parent: int, grace_s: float, command: Sequence[str]) -> int:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return 128 + signal.SIGTERM
    if os.getppid() != parent:  # it died before the descriptor was open
        return 128 + signal.SIGTERM
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    asked: list[int] = []

    def note(number: int, _frame: object) -> None:
        asked.append(number)
        os.write(wake_write, b"x")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    child = subprocess.Popen(command, preexec_fn=_die_with_supervisor)  # noqa: PLW1509 - one thread here
    child_fd = os.pidfd_open(child.pid)
    poll = select.poll()
    for fd in (parent_fd, child_fd, wake_read):
        poll.register(fd, select.POLLIN)
    ready = {fd for fd, _ in poll.poll()}
    if child_fd in ready:
        status = child.wait()
        _end_descendants(grace_s)
        return status if status >= 0 else 128 - status
    _end_descendants(grace_s)
    return 128 + (asked[0] if asked else signal.SIGTERM)


if __name__ == "__main__":
    _parent, _scratch, _grace_s, *_command = sys.argv[1:]
    try:
        _status = _supervise(int(_parent), float(_grace_s), _command)
    finally:
        shutil.rmtree(_scratch, ignore_errors=True)
    sys.exit(_status)
