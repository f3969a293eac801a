"""Progress of a running stage: a Prefect artifact in the UI, a bar in a terminal, log lines elsewhere.

Stages report as often as they like; a thread passes on the newest state every two seconds (an artifact update
takes about 20 ms, and Prefect's client must not be called from a running event loop).
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from slipstream.progress import Progress, Report

EVERY_S = 2.0
LOG_EVERY_S = 20.0


def describe(progress: Progress, left_s: float | None = None) -> str:
    """One line: `120 of 400 prompts, tokens/s 820, failed 0, ETA 12 min`."""
    figures = "".join(f", {name} {value}" for name, value in progress.figures.items())
    eta = "" if left_s is None else f", ETA {duration(left_s)}"
    return f"{progress.done} of {progress.total} {progress.unit}{figures}{eta}"


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `2 h 05 min`."""
    if round(seconds) < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: int) -> str:
    """`820 kB`, `1.4 MB`, `828.0 GB`: bytes in powers of 1,000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count} bytes"


class Pace:
    """Time left, by what was done since the first report: a resumed stage finds much done, and that cost no time."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None  # when, how many were done
        self._last: tuple[float, int] | None = None  # when that number last grew

    def see(self, done: int, now: float) -> None:
        """A report at `now`, in seconds of any clock."""
        if self._first is None or self._last is None or done < self._last[1]:
            self._first = self._last = (now, done)
        elif done > self._last[1]:
            self._last = (now, done)

    def left_s(self, total: int, now: float) -> float | None:
        """Seconds until `total` are done, None while unknown and at the end.

        The unit in work counts as far as time has passed since the last one, so that epochs of an hour count down.
        """
        if self._first is None or self._last is None:
            return None
        (began, known), (ended, done) = self._first, self._last
        if done == known or done >= total:
            return None
        each = (ended - began) / (done - known)
        return (total - done) * each - min(now - ended, each)


class _Reporter:
    def __init__(self, key: str, title: str) -> None:
        self._key, self._title = key, title
        self._newest: Progress | None = None
        self._shown: Progress | None = None
        self._pace = Pace()
        self._artifact: UUID | None = None
        self._logged = 0.0
        self._done = threading.Event()
        self._bar = _bar() if sys.stderr.isatty() else None
        self._row = self._bar.add_task(title, total=None, text="") if self._bar else None

    def report(self, progress: Progress) -> None:
        self._newest = progress
        self._pace.see(progress.done, time.monotonic())

    def loop(self) -> None:
        while not self._done.wait(EVERY_S):
            self.push()

    def finish(self) -> None:
        self._done.set()

    def push(self) -> None:
        progress = self._newest
        if progress is None or progress is self._shown:
            return
        self._shown = progress
        share = 100.0 * progress.done / max(progress.total, 1)
        line = describe(progress, self._pace.left_s(progress.total, time.monotonic()))
        text = f"{self._title}: {line}"
        if self._artifact is None:
            self._artifact = cast(UUID, create_progress_artifact(share, key=self._key, description=text))
        else:
            update_progress_artifact(self._artifact, share, description=text)
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, total=progress.total, completed=progress.done, text=line)
        elif time.monotonic() - self._logged > LOG_EVERY_S:
            self._logged = time.monotonic()
            get_run_logger().info(text)


def _bar() -> Bar:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Bar(*columns, TextColumn("{task.fields[text]}"), transient=True)
    bar.start()
    return bar


@contextmanager
def reporting(key: str, title: str) -> Iterator[Report]:
    """Gives a `report` function whose newest state is shown until the block ends."""
    reporter = _Reporter(key, title)
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(reporter.loop,), daemon=True)
    thread.start()
    try:
        yield reporter.report
    finally:
        reporter.finish()
        thread.join()
        reporter.push()
        if reporter._bar is not None:
            reporter._bar.stop()
