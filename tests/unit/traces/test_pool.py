"""The row pool: one row a key for ever, in the order asked, safe from a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

from slipstream.traces.pool import open_pool
from slipstream.traces.trace import Trace

WRITER = """
import os, signal, sys
from pathlib import Path
from slipstream.traces.pool import open_pool
from slipstream.traces.trace import Trace

with open_pool(Path(sys.argv[1]), "recipe") as pool:
    for i in range(50):
        pool.add(Trace(f"k{i}", (1,), (i,), "stop", None, "x" * 5000))
    pool._db.execute("BEGIN")
    pool.add(Trace("torn", (1,), (2,), "stop", None, None))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def row(key: str, token: int = 1) -> Trace:
    """A small trace."""
    return Trace(key, (1, 2), (token,), "stop", None, "a")


def test_the_first_row_of_a_key_stays(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.add(row("a", 1))
        pool.add(row("a", 2))
        assert list(pool.get(["a"])) == [row("a", 1)]
        assert pool._db.execute("SELECT count(*) FROM traces").fetchone() == (1,)


def test_rows_come_in_the_order_asked(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        for key in "abc":
            pool.add(row(key))
        assert [trace.key for trace in pool.get(["c", "x", "a", "b"])] == ["c", "a", "b"]


def test_missing_keys_in_their_order(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.add(row("b"))
        assert pool.missing(["z", "b", "a"]) == ["z", "a"]
        assert pool.missing([]) == []


def test_more_keys_than_one_query_takes(tmp_path: Path) -> None:
    keys = [f"k{i:04d}" for i in range(1201)]
    with open_pool(tmp_path, "r") as pool:
        for key in keys[::2]:
            pool.add(row(key))
        assert pool.missing(keys) == keys[1::2]
        assert [trace.key for trace in pool.get(keys[::-1])] == keys[::-1][::2]


def test_rows_outlive_the_connection_and_recipes_are_apart(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.add(row("a"))
    with open_pool(tmp_path, "r") as pool:
        assert list(pool.get(["a"])) == [row("a")]
    with open_pool(tmp_path, "other") as pool:
        assert pool.missing(["a"]) == ["a"]


def test_a_killed_writer_leaves_every_committed_row(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with open_pool(tmp_path, "recipe") as pool:
        keys = [f"k{i}" for i in range(50)]
        assert [(t.key, t.output_ids) for t in pool.get([*keys, "torn"])] == [(f"k{i}", (i,)) for i in range(50)]
        assert pool.missing(["torn"]) == ["torn"]


def test_a_second_run_waits_for_the_pool(tmp_path: Path) -> None:
    entered = threading.Event()

    def second() -> None:
        with open_pool(tmp_path, "r"):
            entered.set()

    thread = threading.Thread(target=second)
    with open_pool(tmp_path, "r"):
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(5)
    thread.join()
