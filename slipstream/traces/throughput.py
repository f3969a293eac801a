"""Tokens over time, and who was the limit: the server, or this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BUCKETS = 240
SAMPLE_S = 0.25
BUSY = 0.9  # share of a moment's CPU above which this process is the limit


class Throughput:
    """Counts answers and tokens into buckets of equal length: at most BUCKETS, each then twice as long as before."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.bucket_s = 1.0
        self.answers = self.tokens = 0
        self._buckets: list[int] = [0]
        self._waiting = 0.0  # seconds in which servers had requests and this process was not busy
        self._working = True
        self._first_cpu = time.thread_time()
        self._wall, self._cpu = self.started, self._first_cpu

    def add(self, tokens: int) -> None:
        """One more answer."""
        self.answers += 1
        self.tokens += tokens
        index = int((time.monotonic() - self.started) / self.bucket_s)
        while index >= BUCKETS:
            padded = [*self._buckets, 0] if len(self._buckets) % 2 else self._buckets
            self._buckets = [a + b for a, b in zip(padded[::2], padded[1::2], strict=True)]
            self.bucket_s *= 2
            index //= 2
        self._buckets += [0] * (index + 1 - len(self._buckets))
        self._buckets[index] += tokens

    async def sample(self, working: Callable[[], bool]) -> None:
        """For ever: what share of each moment the event loop's thread computed; `working`: servers have requests."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self._working = working()
            self._look()

    def _look(self) -> None:
        wall, cpu = time.monotonic(), time.thread_time()
        moment = wall - self._wall
        if self._working and cpu - self._cpu < BUSY * moment:
            self._waiting += moment
        self._wall, self._cpu = wall, cpu

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.started

    def figures(self) -> dict[str, object]:
        """For the report: tokens a second by bucket, and the share of time in which the server was the limit."""
        self._look()
        seen = max(self._wall - self.started, 1e-9)
        return {
            "bucket_s": self.bucket_s,
            "tokens_per_s": [round(tokens / self.bucket_s, 1) for tokens in self._buckets],
            "client_cpu_share": round((self._cpu - self._first_cpu) / seen, 4),
            "server_limited_share": round(self._waiting / seen, 4),
        }
