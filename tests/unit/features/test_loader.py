"""Reading a store for training, against hs-connectors' own readers; a planted fault is one sentence, never a batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hs_connectors import FileTransfer, FP8Transfer
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from safetensors.torch import save_file

from slipstream.artifact import Artifact, claim
from slipstream.digest import digest_tokens
from slipstream.errors import Damaged
from slipstream.features import index
from slipstream.features.index import Entry
from slipstream.features.loader import StoreTransfer, is_checked
from slipstream.features.pool import FeaturePool
from slipstream.features.sample import FP8, Form

LENGTHS = (5, 5, 9, 3)
HIDDEN = 16
Make = Callable[..., Artifact]


@pytest.fixture
def store(tmp_path: Path) -> Make:
    """Makes a store of four samples (two of one length) in a type; fp8 by hs-connectors' quantiser."""

    def make(dtype: str = "bfloat16") -> Artifact:
        pool = FeaturePool(tmp_path / "work", dtype, Form(4, HIDDEN, dtype))
        with claim(tmp_path / "work", "features", dtype) as folder:
            (folder.path / "hidden_states").mkdir()
            entries = []
            for row, length in enumerate(LENGTHS):
                token_ids = torch.arange(length) + 100 * row
                states = torch.randn(length, 4, HIDDEN, generator=torch.Generator().manual_seed(row)) * 10
                tensors = {"hidden_states": states.to(torch.bfloat16 if dtype == FP8 else getattr(torch, dtype))}
                if dtype == FP8:
                    codes, scales = quantize_tensor_to_fp8(tensors["hidden_states"])
                    tensors = {"hidden_states": codes, "hidden_states_scales": scales}
                captured = tmp_path / "captured"
                save_file({**tensors, "token_ids": token_ids}, captured)
                info, key = pool.add(token_ids.tolist(), captured), digest_tokens(token_ids.tolist())
                (folder.path / f"hidden_states/hs_{row}.safetensors").hardlink_to(pool.path(key))
                entries.append(Entry(row, f"t{row}", "train", key, info))
            index.write(folder.path / index.FILE, entries, dtype)
            files = {f"hidden_states/hs_{entry.row}.safetensors": entry.sample.file for entry in entries}
            return folder.commit(
                version=1, recipe={}, inputs={}, content=dtype, files={**files, index.FILE: None}, counts={}
            )

    return make


def sample(made: Artifact, row: int) -> Path:
    return made.folder / "hidden_states" / f"hs_{row}.safetensors"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_native_samples_are_what_speculators_reads(store: Make, dtype: str) -> None:
    made = store(dtype)
    theirs = FileTransfer(made.folder / "hidden_states")
    ours = StoreTransfer(made.folder, dtype=torch.bfloat16)
    for row in range(len(LENGTHS)):
        mine, expected = ours.get_cached(row), theirs.get_cached(row)
        assert expected is not None
        assert mine.keys() == expected.keys()
        for name, tensor in expected.items():
            assert mine[name].dtype == tensor.dtype
            assert torch.equal(mine[name], tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_samples_are_what_hs_connectors_dequantises(store: Make, dtype: torch.dtype) -> None:
    made = store(FP8)
    theirs = FP8Transfer(made.folder / "hidden_states", dtype)
    ours = StoreTransfer(made.folder, dtype=dtype)
    for row in range(len(LENGTHS)):
        mine, expected = ours.get_cached(row), theirs.get_cached(row)
        assert expected is not None
        assert mine.keys() == expected.keys()
        assert mine["hidden_states"].dtype == dtype
        assert torch.equal(mine["hidden_states"], expected["hidden_states"])
        assert torch.equal(mine["token_ids"], expected["token_ids"])


def test_samples_in_use_keep_their_memory_and_dropped_ones_give_it_back(store: Make) -> None:
    made = store()
    ours = StoreTransfer(made.folder)
    first = ours.get_cached(0)["hidden_states"]
    copy, address = first.clone(), first.data_ptr()
    others = [ours.get_cached(row)["hidden_states"] for row in (1, 2, 3)]
    assert torch.equal(first, copy)
    assert len({states.untyped_storage().data_ptr() for states in (first, *others)}) == 4
    del first
    assert ours.get_cached(0)["hidden_states"].data_ptr() == address


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-60] ^= 4
    path.write_bytes(data)


def test_one_flipped_bit_is_named_with_both_checksums(store: Make) -> None:
    made = store()
    flip(sample(made, 2))
    assert made.verify() == []
    wanted = made.manifest().files["hidden_states/hs_2.safetensors"].checksum
    ours = StoreTransfer(made.folder)
    ours.get_cached(1)
    with pytest.raises(Damaged, match=rf"hs_2.safetensors: checksum [0-9a-f]{{32}} instead of {wanted}; run") as caught:
        ours.get_cached(2)
    assert f"slipstream verify --deep {made.folder}" in str(caught.value)
    assert "\n" not in str(caught.value)
    StoreTransfer(made.folder, checked=0).get_cached(2)  # only the checksum tells


@pytest.mark.parametrize("checked", [0.0, 1.0])
def test_swapped_samples_of_equal_length_are_found_also_without_checksums(store: Make, checked: float) -> None:
    made = store()
    one, two = sample(made, 0).read_bytes(), sample(made, 1).read_bytes()
    assert len(one) == len(two)
    sample(made, 0).write_bytes(two)
    with pytest.raises(Damaged, match=r"hs_0.safetensors: (checksum|holds 5 tokens of digest)"):
        StoreTransfer(made.folder, checked).get_cached(0)


@pytest.mark.parametrize("size", [0, 100, -1, 1])
def test_a_file_of_another_size_is_found_while_training(store: Make, size: int) -> None:
    made = store()
    ours = StoreTransfer(made.folder)
    whole = sample(made, 2).read_bytes()
    changed = whole[:size] if size < 1 or size == 100 else whole + b"x"
    sample(made, 2).write_bytes(changed)  # after the trainer looked at the store: a quarantine does this in place
    with pytest.raises(Damaged, match=rf"hs_2.safetensors: {len(changed)} bytes instead of {len(whole)}"):
        ours.get_cached(2)
    sample(made, 2).unlink()
    with pytest.raises(Damaged, match=r"hs_2.safetensors: cannot be read \(No such file"):
        ours.get_cached(2)


def test_an_incomplete_store_is_not_opened_and_names_what_is_missing(store: Make) -> None:
    made = store()
    sample(made, 1).unlink()
    sample(made, 2).write_bytes(b"")
    expected = r"2 of its files .*hs_1.safetensors \(missing\), .*hs_2.safetensors \(0 bytes instead of \d+\); run"
    with pytest.raises(Damaged, match=expected):
        StoreTransfer(made.folder)
    with pytest.raises(Damaged, match=r"no manifest\.json"):
        StoreTransfer(made.folder / "hidden_states")


def test_an_index_that_was_changed_is_not_believed(store: Make) -> None:
    made = store()
    path = made.folder / index.FILE
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"index.parquet: checksum [0-9a-f]{32} instead of [0-9a-f]{32}"):
        StoreTransfer(made.folder).get_cached(0)


def test_a_row_that_the_store_does_not_have(store: Make) -> None:
    with pytest.raises(Damaged, match="no row 4 of 4"):
        StoreTransfer(store().folder).get_cached(4)


def test_a_pickled_transfer_holds_settings_only_and_reads_the_same(store: Make) -> None:
    made = store(FP8)
    ours = StoreTransfer(made.folder, 0.5, torch.float32)
    before = ours.get_cached(3)
    pickled = pickle.dumps(ours)
    assert len(pickled) < 1000
    after = pickle.loads(pickled).get_cached(3)
    assert torch.equal(before["hidden_states"], after["hidden_states"])
    assert after["hidden_states"].dtype == torch.float32


def test_the_share_of_checked_rows_is_the_same_rows_always() -> None:
    rows = range(20_000)
    assert all(is_checked(row, 1.0) for row in rows)
    assert not any(is_checked(row, 0.0) for row in rows)
    tenth = {row for row in rows if is_checked(row, 0.1)}
    assert len(tenth) == pytest.approx(2000, abs=150)
    assert tenth <= {row for row in rows if is_checked(row, 0.2)}


def test_the_index_says_what_numpy_and_pyarrow_say(store: Make) -> None:
    made = store()
    ours = StoreTransfer(made.folder)
    for entry in pq.read_table(made.folder / index.FILE).to_pylist():
        found = ours.expected(entry["row"])
        assert (found.size, found.checksum) == (entry["size"], entry["checksum"])
        assert found.tokens == LENGTHS[entry["row"]]
        assert found.key == digest_tokens(np.arange(found.tokens) + 100 * entry["row"])
