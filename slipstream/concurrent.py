"""Coroutines from synchronous stages: one loop a call, and a few workers whose first error comes out as itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` on an event loop of its own and returns what it returns, also when the caller runs inside one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return uvloop.run(main)
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(uvloop.run, main).result()


async def run_workers(work: Callable[[], Awaitable[None]], count: int) -> None:
    """Runs `work()` `count` times at once; the first error ends the others and is raised as it is.

    asyncio.TaskGroup wraps it in an ExceptionGroup, which nobody who waits for a ServerError would catch.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(_as_coroutine(work))
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from errors


async def _as_coroutine(work: Callable[[], Awaitable[None]]) -> None:
    await work()
