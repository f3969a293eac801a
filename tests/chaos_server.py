"""A chat server with random faults, as a process of its own, for benchmarks.

    python tests/chaos_server.py --port 0 --delay-s 0.05 --tokens 100 --errors 0.01 --drops 0.005 --cut 0.002 \\
        --seed 0 --log requests.jsonl

Prints `listening http://127.0.0.1:PORT/v1` and runs until SIGTERM.  Every answer has exactly `--tokens` output ids.
Prompts alone decide them and whether an answer is cut inside its thinking; errors (503) and drops of the connection
are decided by prompt and number of the request, so that asking again helps.

* `--log` gets one line a chat request on its arrival: {"t", "text", "outcome": "ok" | "error" | "drop" | "cut"}
* `GET /control/counts` tells how many there were of each
* `POST /control/away` with {"seconds": 10} resets all connections and refuses new ones for so long
* `/v1/models`, `/tokenize`, and `/v1/completions` with one token, so that clients find it ready

Memory does not grow with requests, only by a number for every different prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import signal
import time
from asyncio import sleep
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from stub_server import (
    END,
    MODEL,
    THINK_CLOSE,
    LoopbackServer,
    Reply,
    as_json,
    completion,
    failed,
    ids_of,
    text_of,
)

FLUSH_EVERY_S = 0.05
UNDER_200 = bytes(i % 200 for i in range(256))  # ids of ordinary text


@dataclass(frozen=True)
class Chaos:
    """What goes wrong how often, and how long answers take and are."""

    delay_s: float = 0.0
    tokens: int = 100
    errors: float = 0.0
    drops: float = 0.0
    cut: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 4:
            raise ValueError("an answer has at least 4 tokens: thinking, its end, text, the end")

    def outcome(self, text: str, number: int) -> str:
        """How the request `number` for this prompt ends; only a cut is the same every time."""
        lot = _lot(self.seed, number, text)
        if lot < self.errors:
            return "error"
        if lot < self.errors + self.drops:
            return "drop"
        return "cut" if _lot(self.seed, "cut", text) < self.cut else "ok"

    def reply(self, text: str, cut: bool) -> Reply:
        """The answer to a prompt, `tokens` output ids long."""
        ids = list(hashlib.shake_128(text.encode()).digest(self.tokens).translate(UNDER_200))
        if cut:
            return Reply(answer=None, finish_reason="length", prompt_ids=ids_of(text)[0], output_ids=ids)
        ids[self.tokens * 3 // 4 - 2] = THINK_CLOSE
        ids[-1] = END
        return Reply(answer=f"answer {ids[0]}", prompt_ids=ids_of(text)[0], output_ids=ids)


class ChaosServer(LoopbackServer):
    """The server; a context manager."""

    def __init__(self, chaos: Chaos, log: Path | None = None, port: int = 0, max_model_len: int = 4096) -> None:
        super().__init__(port, max_model_len)
        self.chaos = chaos
        self.counts = dict.fromkeys(("requests", "ok", "error", "drop", "cut"), 0)
        self._path = log
        self._asked: Counter[int] = Counter()

    def __enter__(self) -> Self:
        self._log = None if self._path is None else self._path.open("a", buffering=1 << 20, encoding="utf-8")
        super().__enter__()
        self._flusher = asyncio.run_coroutine_threadsafe(self._flush(), self._loop)
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        if self._log is not None:
            self._log.close()

    async def answer(self, method: str, path: str, data: bytes) -> web.Response | None:
        match method, path:
            case "POST", "/v1/chat/completions":
                return await self._converse(text_of(json.loads(data)), time.time())
            case "POST", "/v1/completions":
                choice = {"index": 0, "text": "x", "finish_reason": "length"}
                return as_json({"id": "cmpl-1", "object": "text_completion", "model": MODEL, "choices": [choice]})
            case "POST", "/control/away":
                seconds = float(json.loads(data)["seconds"])
                self._outage = asyncio.create_task(self._outage_of(seconds))
                return as_json({"seconds": seconds})
            case "GET", "/control/counts":
                return as_json(self.counts)
        return await super().answer(method, path, data)

    async def _converse(self, text: str, arrived: float) -> web.Response | None:
        known = hash(text)
        outcome = self.chaos.outcome(text, self._asked[known])
        self._asked[known] += 1
        self.counts["requests"] += 1
        self.counts[outcome] += 1
        if self._log is not None:
            self._log.write(json.dumps({"t": arrived, "text": text, "outcome": outcome}) + "\n")
        if self.chaos.delay_s:
            await sleep(self.chaos.delay_s)
        if outcome == "drop":
            return None
        if outcome == "error":
            return failed(503)
        return as_json(completion(self.chaos.reply(text, outcome == "cut")))

    async def _outage_of(self, seconds: float) -> None:
        await sleep(0.05)  # the answer to the request for it comes first
        self._leave()
        await sleep(seconds)
        await self._listen()

    async def _flush(self) -> None:
        while self._log is not None:
            await sleep(FLUSH_EVERY_S)
            self._log.flush()


def _lot(*key: Any) -> float:
    """A number in [0, 1) that belongs to the key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") / 2**64


def main() -> None:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser(description="a chat server with random faults")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--errors", type=float, default=0.0, help="share of requests answered 503")
    parser.add_argument("--drops", type=float, default=0.0, help="share of requests whose connection closes")
    parser.add_argument("--cut", type=float, default=0.0, help="share of prompts whose answer ends in its thinking")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--max-model-len", type=int, default=4096)
    given = parser.parse_args()
    chaos = Chaos(given.delay_s, given.tokens, given.errors, given.drops, given.cut, given.seed)
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    with ChaosServer(chaos, given.log, given.port, given.max_model_len) as server:
        print(f"listening {server.url}", flush=True)
        signal.sigwait(ends)


if __name__ == "__main__":
    main()
