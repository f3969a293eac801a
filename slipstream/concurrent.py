"""A few coroutines side by side, whose first error comes out as itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


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
