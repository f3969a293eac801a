"""Coroutines from synchronous stages, and workers whose first error comes out as itself."""

from __future__ import annotations

import asyncio
import threading

import pytest

from slipstream.concurrent import run_async, run_workers
from slipstream.errors import ServerError


async def where() -> tuple[str, int]:
    """A result, and the thread that made it."""
    await asyncio.sleep(0)
    return "done", threading.get_ident()


async def fail() -> None:
    """An error of the project."""
    await asyncio.sleep(0)
    raise ServerError("gone")


def test_without_a_loop_it_runs_here() -> None:
    assert run_async(where()) == ("done", threading.get_ident())


def test_inside_a_running_loop_it_runs_aside() -> None:
    async def main() -> tuple[str, int]:
        return run_async(where())

    result, thread = asyncio.run(main())
    assert result == "done"
    assert thread != threading.get_ident()


def test_calls_may_follow_and_nest() -> None:
    async def inner() -> int:
        return 2

    async def outer() -> int:
        return run_async(inner()) + run_async(inner())

    assert run_async(outer()) + run_async(inner()) == 6


def test_an_error_comes_out_as_itself_outside_a_loop() -> None:
    with pytest.raises(ServerError, match="gone"):
        run_async(fail())


def test_an_error_comes_out_as_itself_inside_a_loop() -> None:
    async def main() -> None:
        run_async(fail())

    with pytest.raises(ServerError, match="gone"):
        asyncio.run(main())


def test_as_many_workers_as_asked_run_at_once() -> None:
    at_once = 0
    most = 0

    async def work() -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1

    run_async(run_workers(work, 5))
    assert (most, at_once) == (5, 0)


def test_workers_share_one_queue() -> None:
    queue = iter(range(100))
    done: list[int] = []

    async def work() -> None:
        for item in queue:
            await asyncio.sleep(0)
            done.append(item)

    run_async(run_workers(work, 7))
    assert sorted(done) == list(range(100))


def test_no_workers_are_no_work() -> None:
    run_async(run_workers(fail, 0))


def test_the_first_error_ends_the_others_and_is_raised_as_it_is() -> None:
    started = iter(range(3))
    ended: list[str] = []

    async def work() -> None:
        if next(started) == 2:
            raise ServerError("gone")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(ServerError, match="gone"):
        run_async(run_workers(work, 3))
    assert ended == ["cancelled"] * 2


def test_several_errors_at_once_are_one() -> None:
    with pytest.raises(ServerError, match="gone"):
        run_async(run_workers(fail, 4))


def test_workers_of_workers_raise_the_innermost_error() -> None:
    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    with pytest.raises(ServerError, match="gone"):
        run_async(run_workers(work, 2))
