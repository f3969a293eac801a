"""A disk without room: capture pauses, says so, goes on when there is room, and loses no row to it."""

from __future__ import annotations

import errno
import itertools
import os
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stub_server import Capture, StubServer

from slipstream.config import FeaturesConfig
from slipstream.errors import TransientError
from slipstream.features import capture, disk
from slipstream.features.capture import Outcome
from slipstream.features.lease import Lease
from slipstream.features.pool import FeaturePool
from slipstream.progress import Progress, silent
from slipstream.serving import Endpoint

ROWS = [(i, [100 + i, 1, 2, 3]) for i in range(12)]
Run = Callable[..., Outcome]


class Free:
    """What file systems tell: GiB free by folder, `everywhere` for those without an entry."""

    def __init__(self) -> None:
        self.everywhere, self.at = 100.0, dict[str, float]()

    def __call__(self, folder: Path) -> Any:
        gib = next((value for name, value in self.at.items() if str(folder).startswith(name)), self.everywhere)
        return SimpleNamespace(f_bavail=int(gib * disk.GIB), f_frsize=1)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    told = Free()
    monkeypatch.setattr(disk.os, "statvfs", told)
    monkeypatch.setattr(disk, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(disk, "REST_S", 0.2)
    monkeypatch.setattr(capture, "TELL_EVERY_S", 0.05)
    return told


@pytest.fixture
def run(stub: StubServer, pool: FeaturePool, no_backoff: None) -> Run:
    def go(rows: Sequence[tuple[int, Sequence[int]]] = ROWS, report: Any = silent, **more: Any) -> Outcome:
        given: dict[str, Any] = {"layer_ids": [1, 2, 3], "concurrency": 4, "request_timeout_s": 5, "max_attempts": 1}
        lease = Lease(Endpoint(stub.url, "stub"), stub.storage)
        config = FeaturesConfig(**given | {"disk_reserve_gib": 2} | more)
        return capture.capture(rows, lambda: nullcontext(lease), pool, config, report)

    return go


def asked(stub: StubServer) -> Counter[int]:
    return Counter(body["prompt"][0] - 100 for body in stub.asked("/v1/completions") if body["prompt"] != [1])


def later(seconds: float, do: Callable[[], Any]) -> None:
    threading.Timer(seconds, do).start()


def test_no_server_is_started_before_there_is_room(stub: StubServer, run: Run, free: Free) -> None:
    free.everywhere = 1.5
    seen: list[Progress] = []
    at: list[float] = []
    later(0.6, lambda: (at.append(time.time()), setattr(free, "everywhere", 3.0)))
    outcome = run(report=seen.append)
    assert outcome.captured == 12
    assert min(request.at for request in stub.requests) >= at[0]
    assert 0.3 < outcome.paused_s < 3
    paused = next(progress.figures["paused"] for progress in seen if "paused" in progress.figures)
    assert "1.5 GiB free, 2 needed" in str(paused)


def test_a_disk_that_fills_meanwhile_pauses_the_capture(stub: StubServer, run: Run, free: Free) -> None:
    def decide(tokens: list[int], number: int) -> Capture:
        if number == 5:
            free.everywhere = 1.0
            later(0.8, lambda: setattr(free, "everywhere", 3.0))
        return Capture()

    stub.on_capture(decide)
    outcome = run()
    assert (outcome.captured, outcome.lost) == (12, {})
    assert outcome.paused_s > 0.3
    times = sorted(request.at for request in stub.requests if request.path == "/v1/completions")
    gap = max(after - before for before, after in itertools.pairwise(times))
    assert gap > 0.4


def test_the_disk_of_the_servers_counts_as_well(stub: StubServer, run: Run, free: Free) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        stub.storage = Path(other)
        free.at[other] = 0.5
        later(0.5, free.at.clear)
        outcome = run()
        assert outcome.captured == 12
        assert outcome.paused_s > 0.2
        assert os.listdir(other) == []


def test_after_the_patience_one_sentence_and_nothing_is_lost(
    stub: StubServer, pool: FeaturePool, run: Run, free: Free
) -> None:
    def decide(tokens: list[int], number: int) -> Capture:
        if number == 5:
            free.everywhere = 0.25
        return Capture()

    stub.on_capture(decide)
    with pytest.raises(TransientError) as raised:
        run(disk_patience_s=0.3, concurrency=2)
    assert raised.value.transient
    for part in (str(pool.folder), "0.25 GiB free", "2 needed", "disk_reserve_gib 2", "is kept"):
        assert part in str(raised.value)
    kept = sum(pool.find(tokens) is not None for _, tokens in ROWS)
    assert 5 <= kept < 12
    free.everywhere = 100
    stub.on_capture(lambda tokens, number: Capture())
    assert run([row for row in ROWS if pool.find(row[1]) is None]).captured == 12 - kept
    assert set(asked(stub).values()) == {1}


def test_what_is_in_flight_is_kept_room_for(stub: StubServer, run: Run, free: Free) -> None:
    """Room for two samples above the reserve: never more than two in flight, and no pause is called a failure."""
    rows = [(i, [100 + i, *range(500)]) for i in range(6)]
    size = 501 * (4 * 8 * 4 + 8) + capture.HEADER_BYTES
    free.everywhere = 2 + 2.5 * size / disk.GIB
    flying = {"now": 0, "peak": 0}
    extract = stub._extract

    async def counted(body: dict[str, Any]) -> Any:
        flying["now"] += 1
        flying["peak"] = max(flying.values())
        try:
            return await extract(body)
        finally:
            flying["now"] -= 1

    stub._extract = counted  # type: ignore[method-assign]
    stub.on_capture(lambda tokens, number: Capture(delay_s=0.1))
    assert run(rows, disk_patience_s=0.05).captured == 6
    assert flying["peak"] == 2


def test_a_full_disk_here_is_a_pause_and_no_attempt(
    stub: StubServer, pool: FeaturePool, run: Run, free: Free, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, failures = pool.add, [errno.ENOSPC, errno.EDQUOT, errno.ENOSPC]

    def failing(token_ids: Sequence[int], path: Path) -> Any:
        if failures:
            raise OSError(failures.pop(), "no room", str(path))
        return add(token_ids, path)

    monkeypatch.setattr(pool, "add", failing)
    outcome = run()
    assert (outcome.captured, outcome.lost) == (12, {})
    assert sum(asked(stub).values()) == 15
    assert outcome.paused_s > 0.1


def test_a_full_disk_that_statvfs_does_not_show_ends_after_the_patience(
    pool: FeaturePool, run: Run, free: Free, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(token_ids: Sequence[int], path: Path) -> Any:
        raise OSError(errno.EDQUOT, "over quota", str(path))

    monkeypatch.setattr(pool, "add", failing)
    with pytest.raises(TransientError, match="the disk or its quota is full"):
        run(disk_patience_s=0.5)


def test_a_full_index_captures_nothing_twice(stub: StubServer, pool: FeaturePool, run: Run, free: Free) -> None:
    """SQLite's own error, by its page limit: the file is in place and only its entry has no room."""
    for i in range(200):
        pool._record(f"filler{i:04d}" * 6, pool.add([9, i], written(stub, [9, i])))
    pages = pool._db.execute("PRAGMA page_count").fetchone()[0]
    pool._db.execute(f"PRAGMA max_page_count = {pages}")
    later(1.0, lambda: pool._db.execute("PRAGMA max_page_count = 1073741823"))
    rows = [(i, [100 + i % 100, i, 5]) for i in range(200)]
    outcome = run(rows)
    assert (outcome.captured, outcome.lost) == (200, {})
    assert outcome.paused_s > 0
    prompts = [tuple(body["prompt"]) for body in stub.asked("/v1/completions") if body["prompt"] != [1]]
    assert len(prompts) == len(set(prompts)) == 200


def written(stub: StubServer, tokens: list[int]) -> Path:
    path = stub.storage / "filler.safetensors"
    stub.write(Capture(), tokens, path)
    return path


def test_a_full_disk_at_the_server_is_no_lost_row(stub: StubServer, run: Run, free: Free) -> None:
    """Half a file from the stock connector, no file from the plugin's: while the disk has no room, neither is bad."""

    def decide(tokens: list[int], number: int) -> Capture:
        if number in (5, 6):
            free.everywhere = 0.1
            later(0.5, lambda: setattr(free, "everywhere", 3.0))
            return Capture(failed=True) if number == 5 else Capture(data=b"\x60" + bytes(20))
        return Capture()

    stub.on_capture(decide)
    outcome = run()
    assert (outcome.captured, outcome.lost) == (12, {})


def test_the_same_failures_with_room_lose_their_rows(stub: StubServer, run: Run, free: Free) -> None:
    stub.on_capture(lambda tokens, number: Capture(failed=tokens[0] == 105))
    outcome = run()
    assert (outcome.captured, list(outcome.lost)) == (11, [5])


def test_errors_of_a_full_disk_are_explained() -> None:
    with pytest.raises(TransientError, match=r"/x: the disk is full \(.*is kept"), disk.explained(Path("/x")):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), disk.explained(Path("/x")):
        raise PermissionError(errno.EACCES, "no")
    full = sqlite3.connect(":memory:")
    full.execute("CREATE TABLE t (a)")
    full.execute("PRAGMA max_page_count = 2")
    with pytest.raises(TransientError), disk.explained(Path("/x")):
        full.execute("INSERT INTO t VALUES (zeroblob(100000))")
