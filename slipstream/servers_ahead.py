"""Servers that start while an earlier stage still runs, on hosts with room for two (`servers.start_ahead`).

A start costs most of a minute of imports on one core.  `start` begins it in the background; the next
`serving.serve` of the same command line takes that server over instead of starting another.  Inside
`closing()` (the flow holds it) whatever nobody took over is ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """A context manager that is being entered by a thread of its own."""

    def __init__(self, make: Callable[[threading.Event], AbstractContextManager[T]], log: Path) -> None:
        self.log = log
        self._unwanted = threading.Event()
        self._context = make(self._unwanted)
        self._entered: Future[T] = Future()
        threading.Thread(target=self._enter, daemon=True).start()

    def _enter(self) -> None:
        try:
            self._entered.set_result(self._context.__enter__())
        except BaseException as error:
            self._entered.set_exception(error)

    def result(self) -> T:
        """What entering gave; waits for it, raises what it raised."""
        return self._entered.result()

    def close(self) -> None:
        """Leaves the context if it was entered; one that is still being entered is told to give up."""
        self._unwanted.set()
        if self._entered.exception() is None:
            self._context.__exit__(None, None, None)


_waiting: dict[str, Ahead[object]] = {}


def start(key: str, make: Callable[[threading.Event], AbstractContextManager[object]], log: Path) -> None:
    """Begins to enter `make(unwanted)`, which logs to `log`, unless one for `key` waits already.

    Entering must end with an error soon after the event `unwanted` is set.
    """
    if key not in _waiting:
        _waiting[key] = Ahead(make, log)


def take(key: str) -> Ahead[object] | None:
    """The one that waits for `key`; the caller closes it."""
    return _waiting.pop(key, None)


@contextmanager
def closing() -> Iterator[None]:
    """Ends, at the block's end, what was started ahead and never taken."""
    try:
        yield
    finally:
        while _waiting:
            _waiting.popitem()[1].close()
