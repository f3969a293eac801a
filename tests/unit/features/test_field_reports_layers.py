"""Field reports 27 (what a layer id means) and 29 (the final norm exactly once), with the outcomes they ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.artifact import Artifact, claim
from slipstream.config import DrafterConfig, DraftShape, RunConfig, load_config
from slipstream.drafter import build, stage
from slipstream.drafter.export import export_epoch
from slipstream.drafter.job import Job
from slipstream.errors import InputError
from slipstream.features.diagnosis import Layers, Sample, store_fault
from slipstream.features.recipe import CONVENTION, POST_NORM, PRE_NORM, recipe
from slipstream.features.tolerance import TOLERANCES
from slipstream.verifier import Shape, capture_ids

SIX = Shape(model_type="toy", hidden_size=4, num_layers=6, vocab_size=16, eos_token_ids=())
TOKENS = [3, 1, 4, 1, 5]


@pytest.fixture
def toy() -> LlamaForCausalLM:
    """Six layers, the i-th adds 10 ** i; embeddings are zero."""
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=4,
            intermediate_size=8,
            num_hidden_layers=6,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    model.model.embed_tokens.weight.data.zero_()
    for i, layer in enumerate(model.model.layers):
        layer.forward = lambda states, *_, amount=10.0**i, **__: states + amount
    made: LlamaForCausalLM = model.eval()
    return made


def served(model: Any, layer_ids: list[int]) -> torch.Tensor:
    """vLLM's rule: walk through the layers, and before layer k take the state when k is asked for; then the end."""
    state, taken = model.model.embed_tokens(torch.tensor([TOKENS])), {}
    for k, layer in enumerate(model.model.layers):
        if k in layer_ids:
            taken[k] = state
        state = layer(state)
    taken[len(model.model.layers)] = state
    return torch.stack([taken[k][0] for k in layer_ids], dim=1)


def test_27_ids_are_the_sums_that_the_manifests_convention_says(
    toy: LlamaForCausalLM, make_config: Callable[..., RunConfig]
) -> None:
    assert recipe(make_config())["convention"] == CONVENTION
    assert "id k is the residual stream before layer k" in CONVENTION
    ids = capture_ids([1, 3, 5], SIX)
    assert ids == [1, 3, 5, 6]
    states = served(toy, ids)
    for position, total in enumerate((1, 111, 11111, 111111)):  # before layer k: the layers 0 … k - 1 have added
        assert torch.equal(states[:, position], torch.full((5, 4), float(total)))
    with torch.no_grad():
        hidden = toy(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    assert all(torch.equal(states[:, at], hidden[k][0]) for at, k in enumerate((1, 3, 5)))


@pytest.mark.parametrize(
    ("ids", "values"),
    [
        ([0], ("0 is not an auxiliary layer", "from 1 to 5")),
        ([6], ("6 is the final state", "up to 5")),
        ([7], ("7 is not an auxiliary layer", "from 1 to 5")),
        ([1, 3, 6], ("6 is the final state", "up to 5")),
    ],
)
def test_27_ids_out_of_range_are_refused_with_both_values(ids: list[int], values: tuple[str, str]) -> None:
    with pytest.raises(InputError) as raised:
        capture_ids(ids, SIX)
    assert all(value in str(raised.value) for value in values)


def test_27_a_negative_id_is_refused_and_not_counted_from_the_end(root: Path, tmp_path: Path) -> None:
    values = yaml.safe_load((root / "deployments/pocket.yaml").read_text())
    values["features"]["layer_ids"] = [-1]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(InputError, match=r"not negative, got \[-1\]"):
        load_config(tmp_path / "run.yaml")


def test_27_states_of_the_other_convention_are_named(toy: LlamaForCausalLM) -> None:
    """`output of layer k` is this convention's k + 1: what another tool's ids 1, 3, 5 mean."""
    right = served(toy, [1, 3, 5, 6])
    noise = torch.linspace(0.5, 1.5, 5)[:, None, None]  # tokens differ
    other = served(toy, [2, 4, 6, 6])
    sample = Sample(TOKENS, other * noise, right * noise, None)
    said = store_fault(sample, Layers([1, 3, 5, 6], 6), PRE_NORM, None, TOLERANCES["float32"])
    assert said is not None
    assert "layer position 2 holds id 6 (the final state), not 5 (the input of the last layer)" in said


# Report 29: hidden 4, norm weight [2, 1, 1, 1], eps 0, head = identity.

PRE, POST = [1.0, 1.0, 0.0, 0.0], [2.828427, 1.414214, 0.0, 0.0]


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    """The report's verifier as a folder."""
    folder = tmp_path / "verifier"
    folder.mkdir()
    config = LlamaConfig(
        vocab_size=4,
        hidden_size=4,
        intermediate_size=8,
        num_hidden_layers=6,
        num_attention_heads=1,
        num_key_value_heads=1,
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    identity, weight = torch.eye(4), torch.tensor([2.0, 1.0, 1.0, 1.0])
    tensors = {"model.embed_tokens.weight": identity, "lm_head.weight": identity.clone(), "model.norm.weight": weight}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def job(tmp_path: Path, verifier: Path) -> Callable[[str], Job]:
    """A training job for that verifier and a store with this flag."""
    words = tmp_path / "vocabulary"
    words.mkdir()
    np.save(words / "t2d.npy", np.ones(4, dtype=bool))
    np.save(words / "d2t.npy", np.zeros(4, dtype=np.int64))
    shape = DraftShape(num_attention_heads=1, num_key_value_heads=1, head_dim=4, intermediate_size=8, rms_norm_eps=1e-6)

    def make(final_state: str) -> Job:
        return Job(
            verifier=str(verifier),
            features="",
            vocabulary=str(words),
            checkpoints="",
            metrics="",
            layer_ids=[1],
            hidden_size=4,
            vocab_size=4,
            train_rows=1,
            rows=2,
            final_state=final_state,
            shape=shape,
            drafter=DrafterConfig(shape=shape, devices=[]),
        )

    return make


def targets(model: Any, last: list[float]) -> list[float]:
    """What speculators' forward pass takes as the verifier's logits for a stored last state."""
    seen: list[torch.Tensor] = []
    model.verifier_lm_head.register_forward_hook(lambda module, args, out: seen.append(out))
    from speculators.losses import resolve_loss_config

    states = torch.tensor([[last, last]])
    with torch.no_grad():
        model(
            hidden_states=torch.zeros(1, 2, 4),
            input_ids=torch.zeros(1, 2, dtype=torch.long),
            document_ids=torch.zeros(1, 2, dtype=torch.long),
            loss_mask=torch.ones(1, 2),
            verifier_last_hidden_states=states,
            ttt_steps=1,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
    return [float(value) for value in seen[0][0, 0]]


@pytest.mark.parametrize(("flag", "stored"), [(PRE_NORM, PRE), (POST_NORM, POST)])
def test_29_the_norm_is_applied_exactly_once(job: Callable[[str], Job], flag: str, stored: list[float]) -> None:
    """Missing it would give [1, 1, 0, 0], twice [3.578, 0.894, 0, 0]."""
    model = build.build(job(flag), "cpu")
    assert targets(model, stored) == pytest.approx([2.828427, 1.414214, 0, 0], abs=1e-5)


@pytest.mark.parametrize(
    ("flag", "stored", "wrong"), [(POST_NORM, PRE, [1, 1, 0, 0]), (PRE_NORM, POST, [3.577709, 0.894427, 0, 0])]
)
def test_29_a_flag_that_lies_has_the_reports_consequence(
    job: Callable[[str], Job], flag: str, stored: list[float], wrong: list[float]
) -> None:
    assert targets(build.build(job(flag), "cpu"), stored) == pytest.approx(wrong, abs=1e-5)


@pytest.mark.parametrize("made", [{"final_state": "normed"}, {"final_state": None}, {}])
def test_29_an_unknown_flag_is_refused(
    tmp_path: Path, make_config: Callable[..., RunConfig], made: dict[str, Any]
) -> None:
    store = _store(tmp_path, made)
    with pytest.raises(InputError) as raised:
        stage._job(tmp_path, make_config(), store, store, None)
    assert repr(made.get("final_state")) in str(raised.value)
    assert repr(PRE_NORM) in str(raised.value)


@pytest.mark.parametrize("flag", [PRE_NORM, POST_NORM])
def test_29_the_job_says_what_the_stores_manifest_says(
    tmp_path: Path, make_config: Callable[..., RunConfig], flag: str
) -> None:
    store = _store(tmp_path, {"final_state": flag})
    assert stage._job(tmp_path, make_config(), store, store, None).final_state == flag


def _store(root: Path, made: dict[str, Any]) -> Artifact:
    with claim(root, "features", "k") as folder:
        (folder.path / "f").write_text("x")
        counts = {"train": 1, "rows": 2}
        return folder.commit(version=1, recipe=made, inputs={}, content="c", files=["f"], counts=counts)


def test_27_the_exported_ids_reproduce_the_same_tensors(
    toy: LlamaForCausalLM, job: Callable[[str], Job], tmp_path: Path
) -> None:
    """Trained on ids [1, 3, 5]: what a server captures by the exported configuration is what was trained on."""
    wanted = job(PRE_NORM).model_copy(update={"layer_ids": [1, 3, 5]})
    np.save(Path(wanted.vocabulary) / "t2d.npy", np.array([True, False, True, False]))
    np.save(Path(wanted.vocabulary) / "d2t.npy", np.array([0, 1]))
    model = build.build(wanted, "cpu")
    model.save_pretrained(tmp_path / "checkpoints" / "0")
    exported = json.loads((export_epoch(tmp_path, "0", "float32") / "flat" / "config.json").read_text())
    ids = exported["eagle_aux_hidden_state_layer_ids"]
    assert ids == exported["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert torch.equal(served(toy, ids), served(toy, capture_ids([1, 3, 5], SIX))[:, :3])
