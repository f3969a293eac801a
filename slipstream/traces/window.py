"""How many requests to keep in flight at one server: grows while its throughput grows, backs off when it says so."""

from __future__ import annotations

import time
from collections.abc import Callable

START = 64  # or half the maximum: any server takes so many, and whoever allows hundreds means one that takes them
GAIN = 1.05  # a larger window must bring this much more throughput to be kept growing
PATIENCE = 8  # windows without gain after which a larger one is tried again: the load may have changed
CALM_S = 1.0  # one back-off for all the refusals of the same moment


class Window:
    """The bound on requests in flight at one server, between 1 and `maximum`.

    Judged after each window of `limit` answers by their tokens a second.  While a larger window brings at least GAIN
    times as much it doubles, until the server first refuses (429, 503); a refusal halves it, and growth is by an eighth
    from then on.  A growth that brings nothing is taken back, and tried again PATIENCE windows later.  Answers given
    while slots were free say nothing about a larger window and are not judged.
    """

    def __init__(self, maximum: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.maximum = maximum
        self.limit = min(maximum, max(START, maximum // 2))
        self.backoffs = 0
        self._clock = clock
        self._refused_at = float("-inf")
        self._best = 0.0
        self._flat = 0
        self._trial_of: int | None = None  # the window to return to when a larger one brings nothing
        self._restart()

    def _restart(self) -> None:
        self._since = self._clock()
        self._answers = self._tokens = 0
        self._full = False

    def used(self, in_flight: int) -> None:
        """Notes how many requests are in flight after one was sent."""
        self._full = self._full or in_flight >= self.limit

    def answered(self, tokens: int) -> None:
        """Notes an answer of so many tokens."""
        self._answers += 1
        self._tokens += tokens
        if self._answers < self.limit:
            return
        rate = self._tokens / max(self._clock() - self._since, 1e-9)
        if self._full and (self.limit < self.maximum or self._trial_of is not None):
            self._judge(rate)
        self._restart()

    def _judge(self, rate: float) -> None:
        if rate > self._best * GAIN:
            self._best, self._flat = rate, 0
            self._grow()
        elif self._trial_of is not None:
            self.limit, self._trial_of, self._flat = self._trial_of, None, 0
        else:
            self._flat += 1
            if self._flat >= PATIENCE:
                self._best, self._flat = rate, 0
                self._grow()

    def _grow(self) -> None:
        self._trial_of = self.limit if self.limit < self.maximum else None
        step = max(1, self.limit // 8) if self.backoffs else self.limit
        self.limit = min(self.maximum, self.limit + step)

    def refused(self, in_flight: int) -> None:
        """Notes that the server asked for less while so many requests were in flight."""
        now = self._clock()
        if now - self._refused_at < CALM_S:
            return
        self._refused_at = now
        self.backoffs += 1
        self.limit = max(1, min(self.limit, in_flight) // 2)
        self._best, self._flat, self._trial_of = 0.0, 0, None
        self._restart()
