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
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from slipstream.progress import Progress, Report

EVERY_S = 2.0
LOG_EVERY_S = 20.0


def describe(progress: Progress) -> str:
    """One line: `120 of 400 prompts, tokens/s 820, failed 0`."""
    figures = "".join(f", {name} {value}" for name, value in progress.figures.items())
    return f"{progress.done} of {progress.total} {progress.unit}{figures}"


class _Reporter:
    def __init__(self, key: str, title: str) -> None:
        self._key, self._title = key, title
        self._newest: Progress | None = None
        self._shown: Progress | None = None
        self._artifact: UUID | None = None
        self._logged = 0.0
        self._done = threading.Event()
        self._bar = _bar() if sys.stderr.isatty() else None
        self._row = self._bar.add_task(title, total=None, text="") if self._bar else None

    def report(self, progress: Progress) -> None:
        self._newest = progress

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
        text = f"{self._title}: {describe(progress)}"
        if self._artifact is None:
            self._artifact = cast(UUID, create_progress_artifact(share, key=self._key, description=text))
        else:
            update_progress_artifact(self._artifact, share, description=text)
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, total=progress.total, completed=progress.done, text=describe(progress))
        elif time.monotonic() - self._logged > LOG_EVERY_S:
            self._logged = time.monotonic()
            get_run_logger().info(text)


def _bar() -> Bar:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
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
