"""Starting from another drafter: every tensor's fate, and head rows that follow their tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from slipstream.config import DraftShape
from slipstream.drafter import warm_start, warm_start_check, warm_start_source
from slipstream.errors import InputError
from tests.unit.drafter import warm

SHAPE = DraftShape(num_attention_heads=2, num_key_value_heads=1, head_dim=6, intermediate_size=20)
THEIRS, OURS = [1, 4, 6, 9], [0, 4, 9, 11, 15]  # 4 and 9 in common


class Model:
    """A drafter of zeros whose head rows are 100 + the token they mean, as if they were the verifier's."""

    def __init__(self, tokens: list[int]) -> None:
        shapes = warm.TRAINED | {"embed_tokens.weight": (16, 8), "verifier_norm.weight": (8,)}
        self.state = {name: torch.zeros(shape) for name, shape in shapes.items()}
        head = torch.tensor(tokens, dtype=torch.float32)[:, None].expand(-1, 8) + 100
        self.state |= {"lm_head.weight": head.contiguous(), "verifier_lm_head.weight": head.clone()}
        self.state |= warm.mapping(tokens)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state


def start(folder: Path, tokens: list[int]) -> tuple[Model, dict[str, warm_start.Fate]]:
    """A model after the warm start, and the table by name."""
    model = Model(tokens)
    checkpoint = warm_start_check.check(folder, SHAPE, 8, 16, [2, 3, 5])
    return model, {fate.tensor: fate for fate in warm_start.apply(model, checkpoint, warm.t2d(tokens))}


@pytest.mark.parametrize(
    "name", ["midlayer.x.weight", "layers.0.x.weight", "model.layers.0.x.weight", "model.midlayer.x.weight"]
)
def test_canonical_names(name: str) -> None:
    assert warm_start_source.canonical(name) == "layers.0.x.weight"


@pytest.mark.parametrize("form", ["flat", "flat without embeddings", "speculators", "prefixed", "two files"])
def test_every_form_lands_on_the_same_tensors(tmp_path: Path, form: str) -> None:
    tensors, config = warm.tensors(THEIRS), warm.flat_config()
    if form.startswith("flat"):
        tensors = warm.flat(tensors)
    if form == "flat without embeddings":
        del tensors["embed_tokens.weight"]
    if form == "speculators":
        config = warm.speculators_config()
    if form == "prefixed":
        tensors = {f"model.{name}": value for name, value in tensors.items()}
    folder = warm.save(tmp_path / "c", tensors, config)
    if form == "two files":
        names = sorted(tensors)
        save_file({name: tensors[name] for name in names[:5]}, folder / "model.safetensors")
        save_file({name: tensors[name] for name in names[5:]}, folder / "more.safetensors")
    model, fates = start(folder, OURS)
    assert {name for name, fate in fates.items() if fate.fate == "taken"} == warm.TRAINED.keys()
    for name in warm.TRAINED:
        assert bool((model.state[name] == 1).all())
    assert model.state["lm_head.weight"][:, 0].tolist() == [100, 4, 9, 111, 115]


def test_rows_of_the_head_follow_their_tokens(tmp_path: Path) -> None:
    """Tokens 4 and 9 bring their rows; 0, 11 and 15 keep the verifier's; 1 and 6 are gone."""
    model, fates = start(warm.save(tmp_path / "c", warm.flat(warm.tensors(THEIRS))), OURS)
    assert model.state["lm_head.weight"][:, 0].tolist() == [100, 4, 9, 111, 115]
    assert model.state["verifier_lm_head.weight"][:, 0].tolist() == [100, 104, 109, 111, 115]
    assert fates["lm_head.weight"].fate == "remapped"
    assert "2 of 5 rows by token id, 2 unlike the verifier's; 3 new tokens" in fates["lm_head.weight"].detail


def test_every_tensor_of_both_sides_is_accounted_for(tmp_path: Path) -> None:
    tensors = warm.flat(warm.tensors(THEIRS)) | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    _, fates = start(warm.save(tmp_path / "c", tensors), OURS)
    others = {
        "lm_head.weight": ("remapped", [5, 8]),
        "embed_tokens.weight": ("verifier's", [16, 8]),
        "verifier_norm.weight": ("verifier's", [8]),
        "verifier_lm_head.weight": ("verifier's", [5, 8]),
        "d2t": ("fresh", [5]),
        "t2d": ("fresh", [16]),
        "layers.0.self_attn.rotary_emb.inv_freq": ("left out", [3]),
    }
    taken = {name: ("taken", list(shape)) for name, shape in warm.TRAINED.items()}
    assert {name: (fate.fate, fate.shape) for name, fate in fates.items()} == taken | others
    assert fates["embed_tokens.weight"].detail == "the checkpoint's own left out"
    assert fates["verifier_norm.weight"].detail == ""
    assert "own 4 tokens left out" in fates["d2t"].detail


def test_the_same_mapping_is_taken_whole(tmp_path: Path) -> None:
    model, fates = start(warm.save(tmp_path / "c", warm.flat(warm.tensors(THEIRS))), THEIRS)
    assert model.state["lm_head.weight"][:, 0].tolist() == THEIRS
    assert {fates[name].fate for name in ("lm_head.weight", "d2t", "t2d")} == {"taken"}


def test_a_head_over_the_whole_vocabulary_needs_no_mapping(tmp_path: Path) -> None:
    tensors = warm.tensors(list(range(16)))
    del tensors["d2t"], tensors["t2d"]
    model, fates = start(warm.save(tmp_path / "c", warm.flat(tensors)), OURS)
    assert model.state["lm_head.weight"][:, 0].tolist() == OURS
    assert fates["d2t"].detail == "this run's vocabulary"


def test_a_checkpoint_without_a_head_gets_the_verifiers(tmp_path: Path) -> None:
    """speculators 0.9 writes some without: the head was frozen to the verifier's rows."""
    tensors = {name: value for name, value in warm.tensors(THEIRS).items() if "lm_head" not in name}
    model, fates = start(warm.save(tmp_path / "c", tensors, warm.speculators_config()), OURS)
    assert model.state["lm_head.weight"][:, 0].tolist() == [100, 104, 109, 111, 115]
    assert (fates["lm_head.weight"].fate, fates["lm_head.weight"].detail) == ("verifier's", "the checkpoint has none")


def test_no_token_in_common_is_said(tmp_path: Path) -> None:
    model, fates = start(warm.save(tmp_path / "c", warm.flat(warm.tensors(THEIRS))), [0, 2])
    assert model.state["lm_head.weight"][:, 0].tolist() == [100, 102]
    assert (fates["lm_head.weight"].fate, fates["lm_head.weight"].detail[:8]) == ("verifier's", "no token")


def test_layers_that_nobody_names_are_said(tmp_path: Path) -> None:
    config = warm.flat_config()
    del config["eagle_config"]
    _, fates = start(warm.save(tmp_path / "c", warm.flat(warm.tensors(THEIRS)), config), OURS)
    assert fates["config.json"].detail == "names no auxiliary layers: taken on trust"


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight"])
def test_nan_is_refused(tmp_path: Path, name: str) -> None:
    tensors = warm.tensors(THEIRS)
    tensors[name][1, 1] = float("nan")
    with pytest.raises(InputError, match=rf"{name} holds NaN"):
        start(warm.save(tmp_path / "c", tensors), OURS)


tokens = st.sets(st.integers(0, 30), min_size=1)


@given(tokens, tokens)
def test_moved_rows_mean_the_same_token(ours: set[int], theirs: set[int]) -> None:
    maps = [np.array([token in chosen for token in range(31)]) for chosen in (ours, theirs)]
    here, there = warm_start.rows(*maps)
    assert [sorted(ours)[row] for row in here] == [sorted(theirs)[row] for row in there] == sorted(ours & theirs)


def test_the_table_is_written_and_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, fates = start(warm.save(tmp_path / "c", warm.flat(warm.tensors(THEIRS))), OURS)
    warm_start.record(list(fates.values()), tmp_path)
    written = json.loads((tmp_path / warm_start.FILE).read_text())
    assert {"tensor": "fc.weight", "shape": "8 x 24", "fate": "taken", "detail": ""} in written
    assert len(written) == len(fates)
    assert "warm start: fc.weight [8 x 24] taken\n" in capsys.readouterr().out
