"""Training without a store: each row's states are asked of an extraction server when a batch needs them.

`StreamTransfer` is a speculators `HiddenStatesTransfer` over a features artifact that has rows and no states.  A row is
one prefill request; what the server answers passes the checks of a capture (token ids, shape, type, NaN, rows of
zeros), and its file is removed as soon as it is read.  Every epoch asks again.  A row that stays wrong or unanswered
ends the training: it is never skipped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hs_connectors import HiddenStatesTransfer
from pydantic import BaseModel, ConfigDict

from slipstream import chat
from slipstream.chat import Refused
from slipstream.errors import ServerError, TransientError
from slipstream.features.extraction import ExtractionServer, NoFile
from slipstream.features.layout import tensors
from slipstream.features.sample import BadSample, Form, check
from slipstream.features.sample_memory import SampleMemory
from slipstream.serving import Endpoint

Sample = dict[str, torch.Tensor]


class StreamServer(BaseModel):
    """An extraction server as a training process reaches it; `storage` is the folder it writes into."""

    model_config = ConfigDict(frozen=True)
    url: str
    model: str
    storage: str


class Streaming(BaseModel):
    """How to ask: at most `concurrency` requests of one process in flight, each `max_attempts` times."""

    model_config = ConfigDict(frozen=True)
    servers: list[StreamServer]
    layers: int
    hidden: int
    dtype: str
    concurrency: int
    max_attempts: int
    request_timeout_s: float

    @property
    def form(self) -> Form:
        """What every sample looks like."""
        return Form(self.layers, self.hidden, self.dtype)


class StreamTransfer(HiddenStatesTransfer):
    """`hidden_states` [tokens, layers, hidden] and `token_ids` [tokens] of the rows in `store`, from servers.

    A pickled one holds no more than its settings: each data worker has a client and an event loop of its own.
    """

    def __init__(self, store: Path, streaming: Streaming) -> None:
        self.__setstate__((store, streaming))

    def __getstate__(self) -> tuple[Path, Streaming]:
        return self.store, self._streaming

    def __setstate__(self, state: tuple[Path, Streaming]) -> None:
        self.store, self._streaming = state
        self._begun: dict[int, Future[Sample]] = {}
        self._guard = threading.Lock()
        self._memory = SampleMemory()
        self._asking: _Asking | None = None

    def begin(self, rows: Iterable[int]) -> None:
        """Sends the requests for these rows, if that was not done; `get_cached` then waits for their answers."""
        with self._guard:
            if self._asking is None:
                self._asking = _Asking(self.store, self._streaming, self._memory)
            for row in rows:
                if row not in self._begun:
                    self._begun[row] = self._asking.ask(row)

    def get_cached(self, file_idx: int) -> Sample:
        """The row's states; raises TransientError when no server answers, ServerError for a wrong answer."""
        self.begin([file_idx])
        return self._begun.pop(file_idx).result()

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> None:
        """Everything is asked by row."""


class _Asking:
    """One process's client: an event loop in a thread of its own."""

    def __init__(self, store: Path, streaming: Streaming, memory: SampleMemory) -> None:
        import datasets

        self._rows = datasets.load_from_disk(str(store)).with_format(None)
        self._store, self._streaming, self._memory = store, streaming, memory
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="stream", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result()

    async def _connect(self) -> None:
        self._room = asyncio.Semaphore(self._streaming.concurrency)
        session = chat.session(self._streaming.request_timeout_s)
        self._servers = [
            ExtractionServer(Endpoint(server.url, server.model), session, Path(server.storage))
            for server in self._streaming.servers
        ]

    def ask(self, row: int) -> Future[Sample]:
        token_ids = self._rows[row]["input_ids"]
        return asyncio.run_coroutine_threadsafe(self._with_retries(row, token_ids), self._loop)

    async def _with_retries(self, row: int, token_ids: Sequence[int]) -> Sample:
        attempts = self._streaming.max_attempts
        async with self._room:
            for attempt in range(attempts):
                server = self._servers[(row + attempt) % len(self._servers)]
                where = f"{server.endpoint.url}: row {row} of {self._store}"
                try:
                    async with server.sample(token_ids, self._streaming.request_timeout_s) as written:
                        return await asyncio.to_thread(self._read, written.path, token_ids)
                except Refused as error:
                    raise ServerError(f"{where}: {error}; look at the extraction server's log") from error
                except BadSample as error:
                    failed: Exception = ServerError(f"{where}: {error}; look at the extraction server's log")
                except (TransientError, NoFile) as error:
                    failed = TransientError(
                        f"{where}: {error} ({attempts} attempts); look at the extraction server's log and run again: "
                        "training continues after its last finished epoch"
                    )
                if attempt + 1 < attempts:
                    await asyncio.sleep(min(10.0, 2.0**attempt))
        raise failed

    def _read(self, path: Path, token_ids: Sequence[int]) -> Sample:
        data = self._memory.take(path.stat().st_size)
        view, count = memoryview(data.data), 0
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(view[count:]):  # one call gives 2 GiB at most: 37,000 tokens of 57,344 bytes
                count += read
        check(data[:count], token_ids, self._streaming.form)
        states = tensors(data[:count])["hidden_states"]
        dtype = getattr(torch, self._streaming.dtype)
        return {
            "hidden_states": torch.from_numpy(states.data).view(dtype).reshape(states.shape),
            "token_ids": torch.from_numpy(np.asarray(token_ids, dtype=np.int64)),
        }
