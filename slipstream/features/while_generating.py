"""States taken in the pass that generates the traces (`features.capture_while_generating`).

The traces' servers are then extraction servers.  Each answer names the file into which the server writes the states of
prompt and answer without the answer's last token, which the verifier never saw as input.  Beside the generation the
file is awaited, checked against the row's token ids and moved into the row pool.  The file of a rejected answer is
removed.

A file that is missing, late or wrong, or that finds no room on the disk, costs time and nothing else: the features
stage misses the row in the pool and captures it by prefill.

What it saves is the second server and the prefill of every row.  What it costs: vLLM captures through its speculative
decoding, so each step carries a draft token that is thrown away.  FlashMLA and FlashInfer decode two tokens at once;
CPU_MLA takes such a step for a prefill (vLLM 0.32), and there that is more than it saves: on the pocket verifier 58 s
of CPU for 8,466 generated tokens, against 23 s of plain generation and 5 s of prefill.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from slipstream import serving
from slipstream.chat import Answer, Message, Server
from slipstream.config import RunConfig
from slipstream.digest import digest_tokens
from slipstream.errors import ServerError, SlipstreamError
from slipstream.features import servers, vouched
from slipstream.features.disk import Disk
from slipstream.features.extraction import ExtractionServer, request_name
from slipstream.features.pool import FeaturePool
from slipstream.features.recipe import open_pool
from slipstream.features.rows import dropped_tokens
from slipstream.features.sample import BadSample
from slipstream.serving import Endpoint

LANE = "traces"
INGEST_THREADS = 2  # a thread checks 5 GB/s (`sample.check`); 10,000 tokens/s of Kimi-K2.5's width are 0.6
MOST_WAITING = 1024  # files awaited at a time; a server that writes them is never so far behind
WITH_STATES = {"kv_transfer_params": {"include_output_tokens": True}}


class AnsweringServer(ExtractionServer):
    """An extraction server that is asked for turns of a conversation and writes the states of each."""

    async def chat(self, messages: Sequence[Message], tools: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        """As `Server.chat`; the answer names the file with the states."""
        self._asking += 1
        try:
            return await super().chat(messages, tools, {**fields, **WITH_STATES, "request_id": request_name()})
        finally:
            self._asking -= 1
            self._answers += 1

    @asynccontextmanager
    async def file(self, named: str | None, timeout_s: float) -> AsyncIterator[Path]:
        """The file that an answer named, complete; whatever is left of it is removed at the block's end.

        Raises NoFile when it does not come within `timeout_s` or the writer failed, ServerError when the answer named
        none or one outside the storage folder, Unreachable when the server went away.
        """
        path = self._named({"kv_transfer_params": {"hidden_states_path": named}})
        async with self._fetched(path, time.monotonic(), timeout_s) as complete:
            yield complete


@dataclass
class Figures:
    """What became of the answers' states.

    `captured` rows and their `captured_tokens`; `known` rows that the pool had; `rejected` answers whose file was
    removed; `missing` rows that are left to the features stage, and why the `first_missing` one is.
    """

    captured: int = 0
    captured_tokens: int = 0
    known: int = 0
    rejected: int = 0
    missing: int = 0
    first_missing: str | None = None


class WhileGenerating:
    """`slipstream.traces.states.States` for one execution of the traces stage; made by `taking`."""

    def __init__(self, config: RunConfig, pool: FeaturePool, storage: Path, threads: ThreadPoolExecutor) -> None:
        self._pool, self._storage, self._threads = pool, storage, threads
        self._dropped = dropped_tokens(config)
        self._timeout_s = config.features.request_timeout_s
        self._disk = Disk(pool.folder, config.features.disk_reserve_gib, patience_s=0)
        self._servers: list[AnsweringServer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._figures = Figures()

    def server(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> Server:
        """The server behind `endpoint`, which is asked for states with every answer."""
        self._servers.append(AnsweringServer(endpoint, session, self._storage))
        return self._servers[-1]

    def take(self, server: Server, file: str | None, token_ids: Sequence[int] | None) -> None:
        """Takes the file that `server` named with an answer, at once and without waiting."""
        assert isinstance(server, AnsweringServer)
        if len(self._tasks) >= MOST_WAITING:
            self._miss(f"{server.endpoint.url}: {MOST_WAITING} files are behind")
            return
        row = None if token_ids is None else token_ids[: len(token_ids) - self._dropped]
        task = asyncio.ensure_future(self._take(server, file, row))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, server: AnsweringServer, file: str | None, row: Sequence[int] | None) -> None:
        try:
            async with server.file(file, self._timeout_s) as path:
                if row is None:
                    self._figures.rejected += 1
                    return
                if (shortage := self._disk.shortage()) is not None:
                    raise ServerError(shortage)
                stored = asyncio.get_running_loop().run_in_executor(self._threads, self._store, row, path)
                if await stored:
                    self._figures.captured += 1
                    self._figures.captured_tokens += len(row)
                else:
                    self._figures.known += 1
        except (BadSample, SlipstreamError, OSError, sqlite3.Error) as error:
            if row is None:
                self._figures.rejected += 1
            else:
                self._miss(str(error))

    def _store(self, row: Sequence[int], path: Path) -> bool:
        if self._pool.find(row) is not None:
            return False  # manifests vouch for the bytes that are there
        vouched.forget(self._pool.folder, [digest_tokens(row)])
        self._pool.add(row, path)
        return True

    def _miss(self, reason: str) -> None:
        self._figures.missing += 1
        self._figures.first_missing = self._figures.first_missing or reason

    async def settle(self) -> None:
        """Waits for what was taken, at most as long as for one file."""
        _, late = await asyncio.wait(self._tasks, timeout=self._timeout_s) if self._tasks else (None, set())
        for task in late:
            task.cancel()
            self._miss(f"a file was not there {self._timeout_s:g} s after the last answer")
        await asyncio.gather(*late, return_exceptions=True)
        for server in self._servers:
            server.close()

    def figures(self) -> dict[str, Any]:
        """What became of the states, for the manifest."""
        return asdict(self._figures)


@contextmanager
def taking(workdir: Path, config: RunConfig) -> Iterator[WhileGenerating | None]:
    """What takes the states while traces are generated; None when the configuration does not want that."""
    if not config.features.capture_while_generating:
        yield None
        return
    with closing(open_pool(workdir, config)) as pool, ThreadPoolExecutor(INGEST_THREADS, "states") as threads:
        yield WhileGenerating(config, pool, _storage(workdir, config), threads)


@contextmanager
def answering(workdir: Path, config: RunConfig, logs: Path) -> Iterator[list[Endpoint]]:
    """The extraction servers that generate the traces, one a replica; what they wrote and nobody took goes with them.

    Raises InputError when servers are named and the folder that they write into is not there.
    """
    storage = _storage(workdir, config)
    if config.servers.traces_endpoints:
        servers.check_storage(storage)
        yield serving.connect_any(config.servers.traces_endpoints)
        return
    servers.sweep(workdir)
    storage.mkdir(parents=True, exist_ok=True)
    try:
        specs = [servers.spec(config, storage)] * config.servers.replicas
        cache = serving.cache_folder(config.servers, workdir)
        with serving.replicas(config.verifier, config.servers, specs, logs, cache) as endpoints:
            yield endpoints
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def _storage(workdir: Path, config: RunConfig) -> Path:
    """Where the servers that generate write: the folder of the endpoints that the user named, else one of our own."""
    if config.servers.traces_endpoints:
        return Path(str(config.servers.features_storage))
    return servers.storage_folder(workdir, LANE)
