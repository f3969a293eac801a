"""Servers started ahead: taken over once, given up at once when nobody wants them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream import servers_ahead

LOG = Path("ahead.log")


class Recorder:
    """Makes contexts that record when they are entered and left."""

    def __init__(self, ready_after_s: float = 0.0) -> None:
        self.events: list[str] = []
        self.ready_after_s = ready_after_s

    @contextmanager
    def make(self, unwanted: threading.Event) -> Iterator[str]:
        self.events.append("start")
        if unwanted.wait(self.ready_after_s):
            self.events.append("given up")
            raise RuntimeError("unwanted")
        try:
            yield "endpoint"
        finally:
            self.events.append("end")


def test_what_was_started_ahead_is_taken_over_once() -> None:
    recorder = Recorder(0.05)
    servers_ahead.start("a", recorder.make, LOG)
    servers_ahead.start("a", recorder.make, LOG)
    taken = servers_ahead.take("a")
    assert taken is not None
    assert taken.result() == "endpoint"
    assert servers_ahead.take("a") is None
    taken.close()
    assert recorder.events == ["start", "end"]


def test_what_nobody_took_ends_with_the_block() -> None:
    recorder = Recorder()
    with servers_ahead.closing():
        servers_ahead.start("b", recorder.make, LOG)
        time.sleep(0.1)
    assert recorder.events == ["start", "end"]
    assert servers_ahead.take("b") is None


def test_one_that_still_starts_is_given_up_at_once() -> None:
    recorder = Recorder(600)
    started = time.monotonic()
    with servers_ahead.closing():
        servers_ahead.start("c", recorder.make, LOG)
        time.sleep(0.05)
    assert recorder.events == ["start", "given up"]
    assert time.monotonic() - started < 30


def test_a_start_that_failed_says_why_when_it_is_taken() -> None:
    @contextmanager
    def make(unwanted: threading.Event) -> Iterator[str]:
        raise RuntimeError("no port")
        yield ""

    servers_ahead.start("d", make, LOG)
    taken = servers_ahead.take("d")
    assert taken is not None
    with pytest.raises(RuntimeError, match="no port"):
        taken.result()
    taken.close()
