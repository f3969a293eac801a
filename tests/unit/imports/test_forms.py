"""Reading the two forms: order, both shapes of v1's states, float8, and files that are no samples."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from safetensors.torch import save_file

from slipstream.errors import InputError
from slipstream.imports.found import Bad, Sample
from slipstream.imports.opened import open_store
from tests.unit.imports.conftest import WANTED, Made, write_current, write_v1


def save(path: Path, row: Made, **changes: Any) -> None:
    """A v1 file with other values in it."""
    states = list(row.layers(WANTED).unbind(1))
    sample = {"input_ids": torch.tensor(row.ids), "hidden_states": states, "loss_mask": torch.tensor(row.mask)}
    torch.save({name: value for name, value in (sample | changes).items() if value is not None}, path)


def test_v1_in_the_order_of_numbers(tmp_path: Path, rows: list[Made]) -> None:
    store = open_store(write_v1(tmp_path / "v1", rows))
    found = list(store.survey())
    assert [sample.name for sample in found] == [f"data_{i}.pt" for i in range(12)]
    for sample, row in zip(found, rows, strict=True):
        assert isinstance(sample, Sample)
        assert sample.token_ids.tolist() == row.ids
        assert sample.loss_mask.tolist() == row.mask
        assert (sample.layers, sample.hidden, sample.dtype) == (4, 128, "float32")
        assert torch.equal(store.states(sample).values(), row.layers(WANTED))


def test_what_v1_says_of_itself(tmp_path: Path, rows: list[Made]) -> None:
    stated = open_store(write_v1(tmp_path / "v1", rows[:1])).stated
    assert (stated.layer_ids, stated.convention, stated.hidden_size) == ([1, 2, 4, 5], None, 128)
    assert (stated.verifier, stated.where) == ("org/pocket", str(tmp_path / "v1" / "data_config.json"))


@pytest.mark.parametrize("form", ["layers first", "tokens first", "list", "before torch 1.6"])
def test_v1_states_in_every_shape(tmp_path: Path, rows: list[Made], form: str) -> None:
    states = rows[0].layers(WANTED, dtype=torch.bfloat16)
    held = {"layers first": states.transpose(0, 1).contiguous(), "tokens first": states}.get(
        form, list(states.unbind(1))
    )
    sample = {
        "input_ids": torch.tensor(rows[0].ids),
        "hidden_states": held,
        "loss_mask": torch.tensor(rows[0].mask).bool(),
    }
    torch.save(sample, tmp_path / "data_0.pt", _use_new_zipfile_serialization=form != "before torch 1.6")
    store = open_store(tmp_path)
    (found,) = store.survey()
    assert isinstance(found, Sample)
    assert found.dtype == "bfloat16"
    assert torch.equal(store.states(found).codes, states)


class Planted:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


def test_a_pickle_runs_nothing(tmp_path: Path, rows: list[Made]) -> None:
    planted = tmp_path / "planted"
    save(tmp_path / "data_0.pt", rows[0], loss_mask=Planted(str(planted)))
    (tmp_path / "data_1.pt").write_bytes(pickle.dumps(Planted(str(planted))))
    found = list(open_store(tmp_path).survey())
    assert all(isinstance(bad, Bad) and "weights_only" in bad.reason for bad in found)
    assert not planted.exists()
    torch.load(tmp_path / "data_0.pt", weights_only=False)  # the pickle is a working one
    assert planted.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_mask": None}, "has no loss_mask"),
        ({"input_ids": None}, "has no input_ids"),
        ({"input_ids": [1, 2]}, "input_ids is a list instead of a tensor"),
        ({"input_ids": torch.zeros(0, dtype=torch.long)}, "no tokens"),
        ({"input_ids": torch.ones(3, dtype=torch.long)}, "loss_mask has"),
        ({"loss_mask": torch.tensor([0, 1])}, "loss_mask has 2 values for"),
        ({"loss_mask": "full of 2"}, "loss_mask holds 2"),
        ({"loss_mask": "floats"}, "loss_mask is float32"),
        ({"input_ids": "negative"}, "token id -100"),
        ({"hidden_states": "short"}, "hidden states of shape"),
        ({"hidden_states": "uneven"}, "layers of 2 shapes"),
        ({"hidden_states": {}}, "neither a tensor nor a list"),
        ({"hidden_states": []}, "neither a tensor nor a list"),
    ],
)
def test_v1_files_that_are_no_samples(tmp_path: Path, rows: list[Made], changes: dict[str, Any], words: str) -> None:
    row = rows[0]
    count = len(row.ids)
    made = {
        "full of 2": torch.full((count,), 2),
        "floats": torch.zeros(count),
        "negative": torch.tensor([-100, *row.ids[1:]]),
        "short": list(row.layers(WANTED)[:-1].unbind(1)),
        "uneven": [torch.zeros(count, 8), torch.zeros(count, 9)],
    }
    save(tmp_path / "data_0.pt", row, **{k: made[v] if isinstance(v, str) else v for k, v in changes.items()})
    (found,) = open_store(tmp_path).survey()
    assert isinstance(found, Bad)
    assert words in found.reason


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_v1_file_cut_short(tmp_path: Path, rows: list[Made], length: int) -> None:
    write_v1(tmp_path / "v1", rows[:2])
    path = tmp_path / "v1" / "data_1.pt"
    path.write_bytes(path.read_bytes()[:length])
    good, bad = open_store(tmp_path / "v1").survey()
    assert isinstance(good, Sample)
    assert isinstance(bad, Bad)


def test_todays_form(tmp_path: Path, rows: list[Made]) -> None:
    store = open_store(write_current(tmp_path / "store", rows, dtype=torch.bfloat16))
    found = list(store.survey())
    for number, (sample, row) in enumerate(zip(found, rows, strict=True)):
        assert isinstance(sample, Sample)
        assert (sample.token_ids.tolist(), sample.loss_mask.tolist()) == (row.ids, row.mask)
        assert store.file(sample) == tmp_path / "store" / "hidden_states" / f"hs_{number}.safetensors"
        assert sample.dtype == "bfloat16"
        assert torch.equal(store.states(sample).codes, row.layers(WANTED, dtype=torch.bfloat16))
    assert store.stated.layer_ids is None


def test_todays_form_in_float8(tmp_path: Path, rows: list[Made]) -> None:
    store = open_store(write_current(tmp_path / "store", rows[:1]))
    codes, scales = quantize_tensor_to_fp8(rows[0].layers(WANTED))
    held = {"hidden_states": codes, "hidden_states_scales": scales, "token_ids": torch.tensor(rows[0].ids)}
    save_file(held, tmp_path / "store" / "hidden_states" / "hs_0.safetensors")
    (sample,) = store.survey()
    assert isinstance(sample, Sample)
    assert sample.dtype == "float8_e4m3fn"
    assert torch.equal(store.states(sample).values(), codes.float() * scales)


def test_rows_of_todays_form_without_their_states(tmp_path: Path, rows: list[Made]) -> None:
    folder = write_current(tmp_path / "store", rows[:4])
    held = folder / "hidden_states"
    (held / "hs_0.safetensors").unlink()
    shutil.copyfile(held / "hs_2.safetensors", held / "hs_1.safetensors")
    (held / "hs_3.safetensors").write_bytes((held / "hs_3.safetensors").read_bytes()[:-1])
    reasons = [found.reason if isinstance(found, Bad) else "" for found in open_store(folder).survey()]
    assert reasons[0] == "missing"
    assert f"holds {len(rows[2].ids)} other tokens than row 1" in reasons[1]
    assert reasons[2] == ""
    assert "not a hidden-state file" in reasons[3]


def test_what_is_no_store(tmp_path: Path, rows: list[Made]) -> None:
    with pytest.raises(InputError, match="no such folder"):
        open_store(tmp_path / "nowhere")
    (tmp_path / "data.pt").write_bytes(b"")
    with pytest.raises(InputError, match="no hidden-state store: neither"):
        open_store(tmp_path)
    write_v1(tmp_path / "inside", rows[:1])
    with pytest.raises(InputError, match=r"did you mean .*inside"):
        open_store(tmp_path)
    (tmp_path / "inside" / "data_config.json").write_text("{")
    with pytest.raises(InputError, match=r"data_config\.json: not the"):
        open_store(tmp_path / "inside")


def test_mappings_beside_a_store(tmp_path: Path, rows: list[Made]) -> None:
    from slipstream.imports import mappings

    folder = write_v1(tmp_path / "v1", rows[:1])
    t2d = torch.zeros(512, dtype=torch.bool)
    t2d[[3, 5, 9]] = True
    d2t = torch.tensor([3, 5, 9]) - torch.arange(3)
    torch.save(t2d, folder / "t2d.pt")
    torch.save(d2t, folder / "d2t.pt")
    torch.save({3: 7}, folder / "token_freq.pt")
    found = open_store(folder).mappings
    pair, counts = mappings.describe(found, 512)
    assert pair.startswith(f"{folder / 'd2t.pt'}: intact, 3 of 512 tokens")
    assert counts.startswith(f"{folder / 'token_freq.pt'}: not used")
    assert "for 512 tokens and the verifier has 600" in mappings.describe(found, 600)[0]
    torch.save(torch.tensor([3, 5, 9]), folder / "d2t.pt")
    assert "entry must be the OFFSET" in mappings.describe(found, 512)[0]
    np.save(folder / "d2t.npy", d2t.numpy())
    assert mappings.describe(open_store(folder).mappings, 512)[0].startswith(f"{folder / 'd2t.npy'}: intact")
    torch.save(Planted(str(tmp_path / "planted")), folder / "t2d.pt")
    assert "weights_only" in mappings.describe(found, 512)[0]
    assert not (tmp_path / "planted").exists()
    assert "without its other half" in mappings.describe([folder / "d2t.pt"], 512)[0]
