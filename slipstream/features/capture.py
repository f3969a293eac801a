"""Capturing hidden states through vLLM: one prefill request a sample, paired by token ids, never by order."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from slipstream.concurrent import run_async, run_workers
from slipstream.config import FeaturesConfig
from slipstream.errors import ServerError, TransientError, is_transient_status
from slipstream.features.pool import FeaturePool
from slipstream.features.sample import BadSample
from slipstream.progress import Progress, Report
from slipstream.serving import Endpoint

FLUSH_EVERY_S = 2.0  # an idle engine writes a finished request's file only at its next step


@dataclass
class Outcome:
    """What a capture did: samples and tokens stored, and the rows that were lost with the reason."""

    captured: int = 0
    tokens: int = 0
    lost: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


def capture(
    rows: Sequence[tuple[int, Sequence[int]]],
    endpoint: Endpoint,
    storage: Path,
    pool: FeaturePool,
    config: FeaturesConfig,
    report: Report,
) -> Outcome:
    """Captures `rows` (row number, token ids) and moves each sample into the pool as it arrives.

    `storage` is the folder into which the server writes; a path it returns is used only inside it.
    """
    return run_async(_capture(rows, endpoint, storage.resolve(), pool, config, report))


async def _capture(
    rows: Sequence[tuple[int, Sequence[int]]],
    endpoint: Endpoint,
    storage: Path,
    pool: FeaturePool,
    config: FeaturesConfig,
    report: Report,
) -> Outcome:
    outcome = Outcome()
    started = time.monotonic()
    queue = iter(rows)
    async with httpx.AsyncClient(timeout=config.request_timeout_s) as client:

        async def work() -> None:
            for row, token_ids in queue:
                try:
                    await _with_retries(client, endpoint, storage, pool, token_ids, config)
                except (BadSample, ServerError, TransientError) as error:
                    outcome.lost[row] = str(error)
                else:
                    outcome.captured += 1
                    outcome.tokens += len(token_ids)
                outcome.seconds = time.monotonic() - started
                figures = {"tokens/s": round(outcome.tokens / outcome.seconds), "lost": len(outcome.lost)}
                report(Progress(outcome.captured + len(outcome.lost), len(rows), "samples", figures))

        await run_workers(work, min(config.concurrency, len(rows)))
    return outcome


async def _with_retries(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    storage: Path,
    pool: FeaturePool,
    token_ids: Sequence[int],
    config: FeaturesConfig,
) -> None:
    for attempt in range(1, config.max_attempts + 1):
        try:
            async with extracted(client, endpoint, storage, token_ids, config.request_timeout_s) as path:
                await asyncio.to_thread(pool.add, token_ids, path)
            return
        except (BadSample, TransientError):
            if attempt == config.max_attempts:
                raise
            await asyncio.sleep(min(10.0, 2.0 ** (attempt - 1)))


@asynccontextmanager
async def extracted(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    storage: Path,
    token_ids: Sequence[int],
    timeout_s: float,
    flush_every_s: float = FLUSH_EVERY_S,
) -> AsyncIterator[Path]:
    """One prefill request; inside the block the server's finished file is there, afterwards it is not.

    Raises TransientError for what another attempt may not meet, ServerError for an answer that breaks the contract.
    """
    path = await _request(client, endpoint, storage, token_ids)
    try:
        await _await_file(client, endpoint, path, timeout_s, flush_every_s)
        yield path
    finally:
        _remove(path)


async def _post(client: httpx.AsyncClient, endpoint: Endpoint, token_ids: Sequence[int]) -> httpx.Response:
    body = {"model": endpoint.model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0}
    return await client.post(f"{endpoint.url}/completions", json=body)


async def _request(client: httpx.AsyncClient, endpoint: Endpoint, storage: Path, token_ids: Sequence[int]) -> Path:
    try:
        answer = await _post(client, endpoint, token_ids)
    except httpx.HTTPError as error:
        raise TransientError(f"{endpoint.url}: {type(error).__name__}") from error
    if is_transient_status(answer.status_code):
        raise TransientError(f"{endpoint.url}: HTTP {answer.status_code}")
    if answer.status_code != 200:
        raise ServerError(f"{endpoint.url}: HTTP {answer.status_code}: {answer.text[:200]}")
    return _named_file(answer, endpoint, storage)


def _named_file(answer: httpx.Response, endpoint: Endpoint, storage: Path) -> Path:
    """The file that the answer names, resolved; raises ServerError unless it lies inside `storage`."""
    try:
        named = answer.json()["kv_transfer_params"]["hidden_states_path"]
    except (ValueError, LookupError, TypeError):
        named = None
    if not isinstance(named, str) or not named:
        raise ServerError(f"{endpoint.url}: answered without a hidden-state file; it is not an extraction server")
    path = Path(os.path.realpath(named))
    if path == storage or not path.is_relative_to(storage):
        raise ServerError(f"{endpoint.url}: named {named}, outside its storage folder {storage}; not read")
    return path


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_name(path.name + ".lock").unlink(missing_ok=True)


async def _await_file(
    client: httpx.AsyncClient, endpoint: Endpoint, path: Path, timeout_s: float, flush_every_s: float
) -> None:
    """Returns when the server has released the lock beside `path` and the file is there."""
    lock = path.with_name(path.name + ".lock")
    deadline = time.monotonic() + timeout_s
    next_flush = time.monotonic() + flush_every_s
    while time.monotonic() < deadline:
        if path.exists() and _released(lock):
            return
        if time.monotonic() > next_flush:
            next_flush += flush_every_s
            await _flush(client, endpoint, path.parent)
        await asyncio.sleep(0.01)
    raise TransientError(f"{path}: the server answered 200 but wrote no file within {timeout_s:.0f} s")


def _released(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


async def _flush(client: httpx.AsyncClient, endpoint: Endpoint, storage: Path) -> None:
    """One token through the engine, so that it writes what it still holds; its own file is removed when it comes."""
    try:
        answer = await _post(client, endpoint, [1])
    except httpx.HTTPError as error:
        raise TransientError(f"{endpoint.url}: {type(error).__name__}") from error
    if answer.status_code != 200:
        raise TransientError(f"{endpoint.url}: HTTP {answer.status_code} while waiting for a file")
    path = _named_file(answer, endpoint, storage)
    for _ in range(20):
        if path.exists() and _released(path.with_name(path.name + ".lock")):
            break
        await asyncio.sleep(0.01)
    _remove(path)
