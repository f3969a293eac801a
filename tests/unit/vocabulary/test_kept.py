"""The maps of a warm start: read from its weights, refused with both numbers when this run cannot keep them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from slipstream import vocabulary
from slipstream.config import RunConfig
from slipstream.drafter import flat
from slipstream.errors import InputError
from slipstream.vocabulary import kept

T2D = np.array([True, True, True, False, False, True, False, False])
D2T = np.array([0, 0, 0, 2])
FC = np.ones((2, 2), dtype=np.float32)


def checkpoint(folder: Path, tensors: dict[str, np.ndarray], **config: object) -> Path:
    """A folder with these tensors and a config.json."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "tensors",
    [
        {"t2d": T2D, "d2t": D2T},
        {"model.t2d": T2D, "model.d2t": D2T},
        {"t2d": T2D},
        {"d2t": D2T},
        {"t2d": T2D.astype(np.uint8), "d2t": D2T.astype(np.int32)},
    ],
    ids=["both", "prefixed", "t2d alone", "d2t alone", "other integers"],
)
def test_one_map_says_what_the_other_is(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    pair = kept.read(checkpoint(tmp_path / "c", tensors | {"fc.weight": FC}, vocab_size=8))
    assert pair is not None
    assert (pair[0].dtype, pair[1].dtype) == (np.bool_, np.int64)
    assert [part.tolist() for part in pair] == [T2D.tolist(), D2T.tolist()]


def test_maps_inside_the_weights_come_back_as_they_were(tmp_path: Path) -> None:
    """Field report 33: both stand in model.safetensors of an export, and the round trip is exact."""
    given = {"t2d": torch.from_numpy(T2D), "d2t": torch.from_numpy(D2T), "fc.weight": torch.ones(2, 2)}
    held = flat.tensors(given)
    pair = kept.read(checkpoint(tmp_path / "c", {name: value.numpy() for name, value in held.items()}))
    assert pair is not None
    assert [part.tolist() for part in pair] == [T2D.tolist(), D2T.tolist()]
    assert pair[1].tolist() == [0, 0, 0, 2]


def test_the_vocabulary_size_of_a_speculators_config(tmp_path: Path) -> None:
    pair = kept.read(checkpoint(tmp_path / "c", {"d2t": D2T}, transformer_layer_config={"vocab_size": 8}))
    assert pair is not None
    assert pair[0].tolist() == T2D.tolist()


def test_a_checkpoint_without_maps_has_none(tmp_path: Path) -> None:
    assert kept.read(checkpoint(tmp_path / "c", {"fc.weight": FC})) is None


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"t2d": T2D, "d2t": np.array([0, 1, 2, 5])}, r"d2t\[1\] is 1, which makes draft id 1 token 2 of 8.*OFFSET"),
        ({"d2t": np.array([0, 1, 2, 5])}, r"tokens 0 … 8 of a vocabulary of 8.*OFFSETS"),
        ({"d2t": np.array([3, 0, 0, 0])}, r"not in ascending order"),
        ({"t2d": T2D, "d2t": D2T[:3]}, r"t2d marks 4 tokens but d2t has 3 entries"),
        ({"t2d": T2D.astype(np.float32) * 2, "d2t": D2T}, r"t2d must be bool"),
    ],
)
def test_maps_that_break_an_invariant_are_refused(tmp_path: Path, tensors: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(InputError, match=words):
        kept.read(checkpoint(tmp_path / "c", tensors, vocab_size=8))


def test_pickles_are_named_and_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InputError, match=r"no \.safetensors.*pytorch_model\.bin is a pickle"):
        kept.read(tmp_path)


Make = Callable[..., RunConfig]


def warm(tmp_path: Path, selected: list[int], target: int = 512) -> str:
    """A checkpoint whose mapping has these tokens."""
    t2d, d2t = vocabulary.mappings(np.array(selected), target)
    return str(checkpoint(tmp_path / "warm", {"t2d": t2d, "d2t": d2t, "fc.weight": FC}, vocab_size=target))


def keeping(make: Make, folder: str, **fields: object) -> RunConfig:
    """A configuration that keeps the mapping of `folder`."""
    return make(vocabulary={"mapping": "init_from", **fields}, drafter={"init_from": folder})


def test_a_mapping_of_this_run_is_kept(tmp_path: Path, make_config: Make) -> None:
    t2d, d2t = kept.of_warm_start(keeping(make_config, warm(tmp_path, [3, 7, 400]), size=3), 512)
    assert np.flatnonzero(t2d).tolist() == [3, 7, 400]
    assert d2t.tolist() == [3, 6, 398]


@pytest.mark.parametrize(
    ("target", "fields", "words"),
    [
        (500, {"size": 3}, r"mapping is for 500 target tokens and the verifier has 512"),
        (512, {"size": 4}, r"vocabulary\.size: 4 is not .* has 3 draft tokens; write 3"),
        (512, {"size": 3, "must_keep": [7, 9, 8]}, r"must_keep: tokens \[8, 9\] are not in the mapping"),
    ],
)
def test_a_mapping_of_another_run_is_refused(
    tmp_path: Path, make_config: Make, target: int, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        kept.of_warm_start(keeping(make_config, warm(tmp_path, [3, 7, 400], target), **fields), 512)


def test_a_checkpoint_without_its_mapping_is_refused(tmp_path: Path, make_config: Make) -> None:
    folder = checkpoint(tmp_path / "warm", {"fc.weight": FC})
    with pytest.raises(InputError, match=r"no d2t and t2d.*vocabulary\.mapping to traces"):
        kept.of_warm_start(keeping(make_config, str(folder)), 512)
