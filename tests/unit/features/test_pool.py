"""The hidden states' row pool: what is there in full, what was damaged, what a kill left."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save
from stub_server import states_of

from slipstream import atomic
from slipstream.features.pool import FeaturePool
from slipstream.features.sample import BadSample, Form

ROWS = [[i, i + 1, 7] for i in range(5)]


def content(tokens: list[int], dtype: type = np.float32) -> bytes:
    """A sample as the server writes it."""
    states = states_of(tokens, 4, 8).astype(dtype)
    return save({"hidden_states": states, "token_ids": np.array(tokens, dtype=np.int64)})


def open_pool(folder: Path, recipe: str = "r") -> FeaturePool:
    return FeaturePool(folder, recipe, Form(4, 8, "float32"))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FeaturePool]:
    """An empty pool."""
    with closing(open_pool(tmp_path)) as opened:
        yield opened


@pytest.fixture
def add(pool: FeaturePool, tmp_path: Path) -> Callable[[list[int]], Path]:
    """Captures a row and gives its file in the pool."""

    def capture(tokens: list[int]) -> Path:
        written = tmp_path / "captured.safetensors"
        written.write_bytes(content(tokens))
        pool.add(tokens, written)
        assert not written.exists()
        return file_of(pool, tokens)

    return capture


def file_of(pool: FeaturePool, tokens: list[int]) -> Path:
    """Where the file lies: named by the SHA-256 of the token ids, worked out here."""
    key = hashlib.sha256(np.array(tokens, dtype="<u4").tobytes()).hexdigest()[:32]
    return pool.folder / key[:2] / f"{key}.safetensors"


def test_a_sample_moves_in_unchanged(pool: FeaturePool, add: Callable[[list[int]], Path]) -> None:
    path = add(ROWS[0])
    assert path.read_bytes() == content(ROWS[0])
    assert np.array_equal(load_file(path)["hidden_states"], states_of(ROWS[0], 4, 8))
    info = pool.find(ROWS[0])
    assert info is not None
    assert info.file.size == path.stat().st_size
    assert info.file.checksum == xxhash.xxh3_128(path.read_bytes()).hexdigest()
    assert (info.tokens, info.minimum, info.maximum) == (3, 1.0, 3008 + 7 / 64)
    assert pool.find(ROWS[1]) is None


def test_a_kill_after_a_repaired_file_moved_in_leaves_it_without_the_old_checksum(
    pool: FeaturePool, add: Callable[[list[int]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured again, states may differ in their last bits, and the file has the same size."""
    path = add(ROWS[0])
    path.write_bytes(b"")
    written = tmp_path / "again.safetensors"
    states, tokens = states_of(ROWS[0], 4, 8).astype(np.float32) * 1.001, np.array(ROWS[0], dtype=np.int64)
    written.write_bytes(save({"hidden_states": states, "token_ids": tokens}))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pool, "_record", killed)
        with pytest.raises(KeyboardInterrupt):
            pool.add(ROWS[0], written)
    info = pool.find(ROWS[0])
    assert info is not None
    assert info.file.checksum == xxhash.xxh3_128(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "not indexed"])
def test_resume_finds_only_what_is_whole(pool: FeaturePool, add: Callable[[list[int]], Path], indexed: bool) -> None:
    paths = [file_of(pool, tokens) for tokens in ROWS]
    for tokens, path in zip(ROWS[:4], paths, strict=False):
        if indexed:
            add(tokens)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content(tokens))
    whole = content(ROWS[0])
    paths[1].write_bytes(content(ROWS[1])[: len(whole) // 2])
    paths[2].write_bytes(b"")
    paths[3].write_bytes(content(ROWS[3])[:-1])
    paths[4].parent.mkdir(exist_ok=True)
    paths[4].with_name(paths[4].name + ".tmp").write_bytes(content(ROWS[4]))
    assert [pool.find(tokens) is not None for tokens in ROWS] == [True, False, False, False, False]


def test_a_damaged_sample_is_replaced(pool: FeaturePool, add: Callable[[list[int]], Path]) -> None:
    path = add(ROWS[0])
    before = pool.find(ROWS[0])
    path.write_bytes(b"")
    assert pool.find(ROWS[0]) is None
    add(ROWS[0])
    assert pool.find(ROWS[0]) == before is not None


def test_a_file_without_an_entry_is_adopted(pool: FeaturePool, add: Callable[[list[int]], Path]) -> None:
    add(ROWS[0])
    expected = pool.find(ROWS[0])
    pool._db.execute("DELETE FROM files")
    assert pool.find(ROWS[0]) == expected is not None
    assert pool._db.execute("SELECT count(*) FROM files").fetchone() == (1,)


def test_a_file_of_other_tokens_is_not_adopted(pool: FeaturePool) -> None:
    path = file_of(pool, ROWS[0])
    path.parent.mkdir()
    path.write_bytes(content(ROWS[1]))
    assert pool.find(ROWS[0]) is None


def test_a_bad_sample_stays_outside(pool: FeaturePool, tmp_path: Path) -> None:
    written = tmp_path / "captured.safetensors"
    written.write_bytes(content(ROWS[0], np.float16))
    with pytest.raises(BadSample):
        pool.add(ROWS[0], written)
    assert written.exists()
    assert pool.find(ROWS[0]) is None
    assert list(pool.folder.rglob("*.safetensors")) == []


def test_the_index_outlives_the_connection(tmp_path: Path) -> None:
    written = tmp_path / "captured.safetensors"
    written.write_bytes(content(ROWS[0]))
    with closing(open_pool(tmp_path)) as pool:
        info = pool.add(ROWS[0], written)
    with closing(open_pool(tmp_path)) as pool:
        assert pool.find(ROWS[0]) == info
    with closing(open_pool(tmp_path, "other recipe")) as pool:
        assert pool.find(ROWS[0]) is None


def test_several_threads_at_once(pool: FeaturePool, tmp_path: Path) -> None:
    rows = [[i, 2 * i] for i in range(32)]

    def work(part: list[list[int]]) -> None:
        for tokens in part:
            written = tmp_path / f"{tokens[0]}.safetensors"
            written.write_bytes(content(tokens))
            pool.add(tokens, written)

    threads = [threading.Thread(target=work, args=(rows[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(pool.find(tokens) for tokens in rows)


def test_samples_are_synced_once_before_a_manifest_needs_them(
    pool: FeaturePool, add: Callable[[list[int]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(atomic, "fsync_file", synced.append)
    files = [add(row) for row in ROWS[:3]]
    assert synced == []
    keys = [path.stem for path in files]
    assert pool.sync(keys) == 3
    assert sorted(synced) == sorted(files)
    assert pool.sync(keys) == 0


def test_what_an_earlier_start_of_the_machine_left_unsynced_is_compared(
    pool: FeaturePool, add: Callable[[list[int]], Path]
) -> None:
    intact, torn, synced = (add(row) for row in ROWS[:3])
    pool.sync([synced.stem])
    pool._db.execute("UPDATE files SET boot = 'earlier' WHERE boot IS NOT NULL")
    for path in (torn, synced):  # what a power loss makes of pages that never reached the disk
        size = path.stat().st_size
        path.write_bytes(bytes(size))
    assert pool.find(ROWS[0]) is not None
    assert pool.find(ROWS[1]) is None
    assert pool.find(ROWS[2]) is not None  # the disk had it: only a deep verification reads it again
    assert intact.exists()


def test_a_server_that_writes_to_another_file_system(pool: FeaturePool) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == pool.folder.stat().st_dev:
        pytest.skip("one file system only")
    folder = shared / f"slipstream-{threading.get_native_id()}"
    folder.mkdir()
    try:
        (folder / "captured.safetensors").write_bytes(content(ROWS[0]))
        pool.add(ROWS[0], folder / "captured.safetensors")
        assert file_of(pool, ROWS[0]).read_bytes() == content(ROWS[0])
    finally:
        shutil.rmtree(folder)


def test_hosts_that_share_a_pool_share_no_memory(tmp_path: Path) -> None:
    """SQLite's write-ahead log needs memory that all readers map; a rollback journal needs files and locks alone."""
    form = Form(4, 8, "float32")
    modes = {}
    for several in (False, True, False):
        with closing(FeaturePool(tmp_path, "r", form, several_hosts=several)) as opened:
            modes[several] = opened._db.execute("PRAGMA journal_mode").fetchone()[0]
            written = tmp_path / "captured.safetensors"
            written.write_bytes(content(ROWS[0]))
            opened.add(ROWS[0], written)
            assert (opened.folder / "index.sqlite3-shm").exists() != several
    assert modes == {False: "wal", True: "delete"}
