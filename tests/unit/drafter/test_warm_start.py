"""Starting from a published drafter: what is taken, what never is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.drafter import warm_start
from slipstream.errors import InputError

TAKEN = {
    "fc.weight": (8, 24),
    "layers.0.self_attn.q_proj.weight": (8, 16),
    "layers.0.hidden_norm.weight": (8,),
    "norm.weight": (8,),
}
REBUILT = {
    "embed_tokens.weight": (16, 8),
    "lm_head.weight": (4, 8),
    "d2t": (4,),
    "t2d": (16,),
    "verifier_norm.weight": (8,),
    "verifier_lm_head.weight": (4, 8),
}


class Model:
    """A drafter of zeros that keeps what is loaded into it."""

    def __init__(self) -> None:
        self.state = {name: torch.zeros(shape) for name, shape in (TAKEN | REBUILT).items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, torch.Tensor], strict: bool) -> None:
        assert state.keys() <= self.state.keys()
        self.state |= state


def given() -> dict[str, torch.Tensor]:
    """A checkpoint of ones under speculators' names."""
    return {name: torch.ones(shape) for name, shape in (TAKEN | REBUILT).items()}


def flat(name: str) -> str:
    """The flat form's name."""
    return name.replace("layers.0.", "midlayer.")


def save(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return folder


@pytest.mark.parametrize(
    "name", ["midlayer.x.weight", "layers.0.x.weight", "model.layers.0.x.weight", "model.midlayer.x.weight"]
)
def test_canonical_names(name: str) -> None:
    assert warm_start.canonical(name) == "layers.0.x.weight"


@pytest.mark.parametrize("form", ["speculators", "flat", "prefixed", "two files"])
def test_every_form_lands_on_the_same_tensors(tmp_path: Path, form: str) -> None:
    tensors = given()
    if form == "flat":
        tensors = {flat(name): value for name, value in tensors.items() if not name.startswith("verifier_")}
    if form == "prefixed":
        tensors = {f"model.{name}": value for name, value in tensors.items()}
    folder = save(tmp_path / "c", tensors)
    if form == "two files":
        names = sorted(tensors)
        save(folder, {name: tensors[name] for name in names[:5]})
        save(folder, {name: tensors[name] for name in names[5:]}, "more.safetensors")
    model = Model()
    fate = warm_start.apply(model, folder)
    assert {name for name, what in fate.items() if what == "taken"} == TAKEN.keys()
    for name in TAKEN:
        assert bool((model.state[name] == 1).all())


def test_vocabulary_and_head_are_never_taken(tmp_path: Path) -> None:
    model = Model()
    fate = warm_start.apply(model, save(tmp_path / "c", given()))
    assert {name for name, what in fate.items() if what == "rebuilt"} == REBUILT.keys()
    for name in REBUILT:
        assert bool((model.state[name] == 0).all())


def test_a_head_of_another_vocabulary_does_not_matter(tmp_path: Path) -> None:
    model = Model()
    other = given() | {"lm_head.weight": torch.ones(99, 8), "t2d": torch.ones(500)}
    warm_start.apply(model, save(tmp_path / "c", other))
    assert model.state["lm_head.weight"].shape == (4, 8)


def test_types_follow_the_model(tmp_path: Path) -> None:
    model = Model()
    warm_start.apply(model, save(tmp_path / "c", {name: value.bfloat16() for name, value in given().items()}))
    assert {value.dtype for value in model.state.values()} == {torch.float32}


def test_another_shape_is_named(tmp_path: Path) -> None:
    other = given() | {"fc.weight": torch.ones(8, 16)}
    with pytest.raises(InputError, match=r"fc\.weight is \[8, 16\], this drafter needs \[8, 24\]"):
        warm_start.apply(Model(), save(tmp_path / "c", other))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    less = {name: value for name, value in given().items() if name != "norm.weight"}
    with pytest.raises(InputError, match=r"norm\.weight is missing"):
        warm_start.apply(Model(), save(tmp_path / "c", less))


def test_an_unknown_tensor_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    model = Model()
    with pytest.raises(InputError, match=r"layers\.1\.x has no place"):
        warm_start.apply(model, save(tmp_path / "c", given() | {"layers.1.x": torch.ones(1)}))
    assert bool((model.state["fc.weight"] == 0).all())


@pytest.mark.parametrize("content", [b"", b"\x10", b"not safetensors at all"])
def test_an_unreadable_checkpoint_is_an_input_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        warm_start.read(tmp_path)


def test_a_folder_without_weights_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InputError, match=r"no \.safetensors"):
        warm_start.read(tmp_path)
