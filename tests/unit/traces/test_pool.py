"""The traces' ledger: one row a key and turn for ever, complete conversations, safe from kills and full disks."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slipstream.errors import Damaged, StageFailed
from slipstream.traces.pool import BATCH, TracePool, batches, open_pool
from slipstream.traces.trace import Trace

PREAMBLE = """
import os, resource, signal, sys
from pathlib import Path
from slipstream.traces.pool import open_pool
from slipstream.traces.trace import Trace

folder = Path(sys.argv[1])
def row(i): return Trace(f"k{i}", (1,), (i,), "stop", None, "x" * 5000)
"""
KILLED = """
with open_pool(folder, "r") as pool:
    pool.add("k0", row(0), True)
with open_pool(folder, "r") as pool:
    for i in range(1, 50):
        pool.add(f"k{i}", row(i), True)
    pool._db.execute("PRAGMA cache_size = 2")  # so that what is not committed reaches the log as well
    pool._db.execute("BEGIN IMMEDIATE")
    for i in range(50, 60):
        pool.add(f"k{i}", row(i), True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
WITHOUT_ROOM = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    with open_pool(folder, "r") as pool:
        pool.add("new", row(1), True)
except Exception as error:
    print(type(error).__name__, error)
"""


def row(key: str, token: int = 1, turn: int = 0, answer: str = "a") -> Trace:
    """A small trace."""
    return Trace(key, (1, 2), (token,), "stop", None, answer, turn)


def python(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program on the pools in a folder."""
    command = [sys.executable, "-c", PREAMBLE + program, str(folder)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def database(folder: Path) -> Path:
    """Where the rows of recipe `r` lie."""
    return folder / "pool" / "traces" / "r" / "rows.sqlite3"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a writer killed inside a transaction left: k0 in the database, k1 … k49 in the log, ten more unfinished."""
    folder = tmp_path_factory.mktemp("killed")
    assert python(KILLED, folder).returncode == -signal.SIGKILL
    assert database(folder).with_suffix(".sqlite3-wal").stat().st_size > 55 * 5000  # more than what was committed
    return folder


def test_the_first_row_of_a_key_and_turn_stays(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.add("a", row("a", 1), True)
        pool.add("a", row("a", 2), True)
        assert pool.get(["a"]) == {"a": [row("a", 1)]}
        assert pool._db.execute("SELECT count(*) FROM rows").fetchone() == (1,)


def test_a_conversation_without_its_last_turn_is_missing(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.add("a", row("a", 1, 0), False)
        pool.add("a", row("a", 2, 1), False)
        assert set(pool.missing(["a"])) == {"a"}
        assert pool.get(["a"]) == {}
        assert pool.turns("a") == [row("a", 1, 0), row("a", 2, 1)]


def test_a_later_run_continues_a_conversation_where_it_stands(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.add("a", row("a", 1, 0), False)
    with open_pool(tmp_path, "r") as pool:
        assert [trace.turn for trace in pool.turns("a")] == [0]
        pool.add("a", row("a", 2, 1), True)
        assert set(pool.missing(["a"])) == set()
        assert pool.get(["a"]) == {"a": [row("a", 1, 0), row("a", 2, 1)]}


def test_turns_come_in_order_whatever_the_order_of_writing(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        for turn in (10, 2, 0, 1):
            pool.add("a", row("a", turn, turn), turn == 10)
        assert [trace.turn for trace in pool.get(["a"])["a"]] == [0, 1, 2, 10]
        assert [trace.turn for trace in pool.turns("a")] == [0, 1, 2, 10]


def test_finish_completes_what_cannot_be_continued(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.add("a", row("a", 1, 0), False)
        pool.add("a", row("a", 2, 1), False)
        pool.add("b", row("b"), False)
        pool.fail("a", "prompt_too_long: 99 tokens")
        pool.finish("a")
        assert pool.get(["a", "b"]) == {"a": [row("a", 1, 0), row("a", 2, 1)]}
        assert set(pool.missing(["a", "b"])) == {"b"}
        assert pool.errors(["a"]) == {}


def test_finish_of_nothing_makes_nothing(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.finish("a")
        assert set(pool.missing(["a"])) == {"a"}


def test_only_the_keys_asked_for(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        for key in "abc":
            pool.add(key, row(key), True)
        assert pool.get(["c", "x", "a"]) == {"a": [row("a")], "c": [row("c")]}
        assert set(pool.missing(["c", "x", "a"])) == {"x"}
        assert pool.turns("x") == []


def test_no_keys_are_no_query(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        assert (pool.get([]), set(pool.missing([])), pool.errors([])) == ({}, set(), {})


def test_a_failure_is_kept_until_it_succeeds(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.fail("a", "HTTP 500: oh")
        pool.fail("a", "timeout: no answer")
        pool.fail("b", "HTTP 400: no")
    with open_pool(tmp_path, "r") as pool:
        assert pool.errors(["a", "b", "c"]) == {"a": "timeout: no answer", "b": "HTTP 400: no"}
        assert set(pool.missing(["a", "b"])) == {"a", "b"}
        pool.add("a", row("a"), True)
        assert pool.errors(["a", "b"]) == {"b": "HTTP 400: no"}


def test_another_thread_may_use_it(tmp_path: Path) -> None:
    """`run_async` inside a running loop uses a thread of its own."""
    with open_pool(tmp_path, "r") as pool:
        thread = threading.Thread(target=lambda: pool.add("a", row("a"), True))
        thread.start()
        thread.join()
        assert set(pool.missing(["a"])) == set()


def test_a_failed_turn_leaves_the_turns_before_it(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.add("a", row("a"), False)
        pool.fail("a", "timeout: no answer")
        assert pool.turns("a") == [row("a")]


def test_more_keys_than_one_query_takes(tmp_path: Path) -> None:
    keys = [f"k{i:04d}" for i in range(2 * BATCH + 201)]
    with open_pool(tmp_path, "r") as pool:
        for key in keys[::2]:
            pool.add(key, row(key), True)
        assert set().union(*(set(pool.missing(batch)) for batch in batches(keys))) == set(keys[1::2])
        assert [key for batch in batches(keys) for key in pool.get(batch)] == keys[::2]


def test_batches_hold_everything_once_and_in_order() -> None:
    assert list(batches([])) == []
    assert [len(batch) for batch in batches(range(BATCH))] == [BATCH]
    assert [len(batch) for batch in batches(iter(range(2 * BATCH + 1)))] == [BATCH, BATCH, 1]
    assert [item for batch in batches(range(2 * BATCH + 1)) for item in batch] == list(range(2 * BATCH + 1))


def test_rows_outlive_the_connection_and_recipes_are_apart(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.add("a", row("a"), True)
    with open_pool(tmp_path, "r") as pool:
        assert pool.get(["a"]) == {"a": [row("a")]}
    with open_pool(tmp_path, "other") as pool:
        assert set(pool.missing(["a"])) == {"a"}


def test_text_that_utf_8_cannot_hold_is_stored(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.add("a", row("a", answer="half a pair \ud83d \x00"), True)
        assert pool.turns("a")[0].answer == "half a pair \ud83d \x00"


def test_a_killed_writer_leaves_every_committed_row_and_no_other(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    keys = [f"k{i}" for i in range(60)]
    with open_pool(tmp_path, "r") as pool:
        assert {key: turns[0].output_ids for key, turns in pool.get(keys).items()} == {f"k{i}": (i,) for i in range(50)}
        assert set(pool.missing(keys)) == set(keys[50:])


@pytest.mark.parametrize("cut", [1, 30, 4096 + 24, 100_001, 300_000, 600_000, None], ids=lambda cut: f"{cut} bytes")
def test_a_torn_log_keeps_what_was_committed_before_the_tear(killed: Path, tmp_path: Path, cut: int | None) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    log = database(tmp_path).with_suffix(".sqlite3-wal")
    data = log.read_bytes()
    log.write_bytes(b"" if cut is None else data[:-cut])
    keys = [f"k{i}" for i in range(60)]
    with open_pool(tmp_path, "r") as pool:
        kept = len(pool.get(keys))
        assert set(pool.missing(keys)) == set(keys[kept:])  # the first ones, in the order of their commits
        assert kept >= 1  # k0 was in the database itself
        for key in keys[kept:]:
            pool.add(key, row(key), True)
    with open_pool(tmp_path, "r") as pool:
        assert set(pool.missing(keys)) == set()
    if cut is None:
        assert kept == 1
    elif cut < 10 * 5000:  # within the ten rows that were not committed
        assert kept == 50
    else:
        assert 49 - cut / 5000 < kept < 50


def test_a_flipped_bit_in_the_log_drops_what_follows_it(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    log = database(tmp_path).with_suffix(".sqlite3-wal")
    data = bytearray(log.read_bytes())
    data[100_000] ^= 1
    log.write_bytes(data)
    keys = [f"k{i}" for i in range(60)]
    with open_pool(tmp_path, "r") as pool:
        kept = pool.get(keys)
        assert {key: turns[0].output_ids for key, turns in kept.items()} == {f"k{i}": (i,) for i in range(len(kept))}
        assert 5 <= len(kept) < 25  # 100,000 bytes are at most 20 rows of 5,000


def one_sentence(text: str, path: Path) -> bool:
    """Whether an error names its file and is one line."""
    return text.startswith(f"{path}: ") and "\n" not in text


@pytest.mark.parametrize("content", [b"not a database" * 500, b"SQLite format 3\x00" + b"\xff" * 9000])
def test_a_file_that_is_no_database_is_damaged(tmp_path: Path, content: bytes) -> None:
    path = database(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(Damaged) as caught, open_pool(tmp_path, "r"):
        pass
    assert one_sentence(str(caught.value), path)
    assert "move it away" in str(caught.value)
    assert path.read_bytes() == content


def test_a_shortened_database_is_damaged(tmp_path: Path) -> None:
    filled(tmp_path)
    path = database(tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(Damaged), open_pool(tmp_path, "r"):
        pass


def filled(folder: Path) -> list[str]:
    """A pool of forty long rows, closed; returns their keys."""
    keys = [f"k{i}" for i in range(40)]
    with open_pool(folder, "r") as pool:
        for key in keys:
            pool.add(key, row(key, answer="x" * 3000), True)
    return keys


def test_a_damaged_page_is_damaged(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    path = database(tmp_path)
    data = path.read_bytes()
    middle = len(data) // 2 // 4096 * 4096
    path.write_bytes(data[:middle] + b"\xff" * 4096 + data[middle + 4096 :])
    with open_pool(tmp_path, "r") as pool, pytest.raises(Damaged, match=r"rows\.sqlite3"):
        [pool.turns(key) for key in keys]


def fill_up(pool: TracePool) -> None:
    """Lets the database grow no more, as on a full disk."""
    pages = pool._db.execute("PRAGMA page_count").fetchone()[0]
    pool._db.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.add("a", row("a"), True)
        pool.add("b", row("b"), False)
        fill_up(pool)
        for _ in range(2):
            with pytest.raises(StageFailed) as caught:
                pool.add("c", row("c", answer="x" * 9000), True)
            assert one_sentence(str(caught.value), database(tmp_path))
            assert "full" in str(caught.value)
        assert pool.get(["a"]) == {"a": [row("a")]}
    with open_pool(tmp_path, "r") as pool:
        assert pool.get(["a"]) == {"a": [row("a")]}
        assert pool.turns("b") == [row("b")]
        assert set(pool.missing(["a", "b", "c"])) == {"b", "c"}
        pool.add("c", row("c", answer="x" * 9000), True)
        assert set(pool.missing(["c"])) == set()


def test_a_reason_that_does_not_fit_on_the_disk_is_the_same_sentence(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        fill_up(pool)
        with pytest.raises(StageFailed, match="make room"):
            pool.fail("a", "x" * 9000)
        assert pool.errors(["a"]) == {}


def test_no_room_at_the_start_is_no_damage(tmp_path: Path) -> None:
    filled(tmp_path)
    done = python(WITHOUT_ROOM, tmp_path)
    assert done.stdout.startswith("StageFailed ")
    assert "move it away" not in done.stdout


def test_a_second_run_waits_for_the_pool(tmp_path: Path) -> None:
    entered = threading.Event()

    def second() -> None:
        with open_pool(tmp_path, "r") as pool:
            assert set(pool.missing(["a"])) == set()
            entered.set()

    thread = threading.Thread(target=second)
    with open_pool(tmp_path, "r") as pool:
        thread.start()
        assert not entered.wait(0.2)
        pool.add("a", row("a"), True)
    assert entered.wait(5)
    thread.join()


def test_an_error_inside_gives_the_pool_back(tmp_path: Path) -> None:
    def broken() -> None:
        with open_pool(tmp_path, "r") as pool:
            pool.add("a", row("a"), True)
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    with open_pool(tmp_path, "r") as pool:
        assert set(pool.missing(["a"])) == set()


def test_what_is_missing_says_whether_it_was_begun(tmp_path: Path) -> None:
    with open_pool(tmp_path, "r") as pool:
        pool.add("begun", row("begun"), final=False)
        pool.add("done", row("done"), final=True)
        assert pool.missing(["begun", "done", "new"]) == {"begun": True, "new": False}
