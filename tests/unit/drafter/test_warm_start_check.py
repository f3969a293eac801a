"""What cannot be started from is refused from headers and config.json, with both values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import plan
from slipstream.artifact import Artifact
from slipstream.config import DrafterConfig, DraftShape, RunConfig
from slipstream.drafter import build, stage, warm_start_check
from slipstream.drafter.job import Job
from slipstream.errors import InputError
from slipstream.progress import silent
from tests.unit.drafter import warm

SHAPE = DraftShape(num_attention_heads=2, num_key_value_heads=1, head_dim=6, intermediate_size=20)
TOKENS = [1, 4, 6, 9]


def check(folder: Path, **run: Any) -> None:
    """As a run of the miniature shape."""
    given = {"shape": SHAPE, "hidden": 8, "vocab": 16, "layer_ids": [2, 3, 5]} | run
    warm_start_check.check(folder, **given)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A drafter in AQ-MedAI's form that fits."""
    return warm.save(tmp_path / "c", warm.flat(warm.tensors(TOKENS)))


def test_what_fits_passes(folder: Path) -> None:
    check(folder)
    check(folder, shape=SHAPE.model_copy(update={"max_position_embeddings": 2048}))  # no weight depends on it


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"hidden": 16}, "hidden_size 8 where this run has 16"),
        ({"vocab": 20}, "vocab_size 16 where this run has 20"),
        ({"layer_ids": [1, 3, 5]}, r"auxiliary layers \[2, 3, 5\] where this run has \[1, 3, 5\]"),
        ({"layer_ids": [3, 5]}, r"auxiliary layers \[2, 3, 5\] where this run has \[3, 5\]"),
        ({"shape": {"num_attention_heads": 4}}, "num_attention_heads 2 where this run has 4"),
        ({"shape": {"num_key_value_heads": 2}}, "num_key_value_heads 1 where this run has 2"),
        ({"shape": {"head_dim": 8}}, "head_dim 6 where this run has 8"),
        ({"shape": {"intermediate_size": 24}}, "intermediate_size 20 where this run has 24"),
        ({"shape": {"rms_norm_eps": 1e-5}}, "rms_norm_eps 1e-06 where this run has 1e-05"),
        ({"shape": {"rope_theta": 5e4}}, "rope_theta 1000000.0 where this run has 50000.0"),
        (
            {"shape": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
            r"rope_scaling None where this run has \{'rope_type': 'linear', 'factor': 2.0\}",
        ),
        ({"shape": {"norm_before_residual": True}}, "norm_before_residual False where this run has True"),
        ({"shape": {"norm_before_fc": True}}, "norm_before_fc False where this run has True"),
        ({"shape": {"fc_norm": True}}, "fc_norm False where this run has True"),
        ({"shape": {"norm_output": True}}, "norm_output False where this run has True"),
    ],
)
def test_other_conventions_are_refused_with_both_values(folder: Path, run: dict[str, Any], words: str) -> None:
    if "shape" in run:
        run = {"shape": DraftShape.model_validate(SHAPE.model_dump() | run["shape"])}
    with pytest.raises(InputError, match=words):
        check(folder, **run)


def test_all_that_differs_is_named_at_once(folder: Path) -> None:
    with pytest.raises(InputError, match=r"hidden_size 8 where this run has 16; .*head_dim 6 where this run has 4"):
        check(folder, hidden=16, shape=SHAPE.model_copy(update={"head_dim": 4}))


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def with_(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("midlayer.hidden_norm.weight"), r"tensor layers\.0\.hidden_norm\.weight is missing"),
        (with_("fc.weight", torch.ones(8, 16)), r"fc\.weight is \[8, 16\], this drafter needs \[8, 24\]"),
        (with_("midlayer.mlp.up_proj.weight", torch.ones(24, 8)), r"up_proj\.weight is \[24, 8\], .* needs \[20, 8\]"),
        (with_("midlayer.q_norm.weight", torch.ones(6)), r"tensor midlayer\.q_norm\.weight has no place"),
        (with_("midlayer.self_attn.q_proj.bias", torch.ones(12)), r"q_proj\.bias has no place"),
        (with_("fc.weight", torch.ones(8, 24, dtype=torch.int8)), r"fc\.weight is I8, quantised"),
        (with_("lm_head.weight", torch.ones(5, 8)), r"lm_head\.weight is \[5, 8\], its mapping needs \[4, 8\]"),
        (with_("layers.0.hidden_norm.weight", torch.ones(8)), r"are both tensor layers\.0\.hidden_norm\.weight"),
        (with_("d2t", torch.tensor([1, 4, 6, 9])), r"d2t\[0\] is 1|OFFSET"),
        (with_("t2d", torch.ones(16, dtype=torch.bool)), r"t2d marks 16 tokens but d2t has 4 entries"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: Any, words: str) -> None:
    tensors = warm.flat(warm.tensors(TOKENS))
    change(tensors)
    with pytest.raises(InputError, match=words):
        check(warm.save(tmp_path / "c", tensors))


def test_a_checkpoint_without_its_mapping_is_refused(tmp_path: Path) -> None:
    tensors = warm.flat(warm.tensors(TOKENS))
    del tensors["d2t"], tensors["t2d"]
    with pytest.raises(InputError, match="no d2t and t2d beside a head of 4 rows where the verifier has 16 tokens"):
        check(warm.save(tmp_path / "c", tensors))


def test_a_mapping_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tensors = warm.flat(warm.tensors(TOKENS)) | warm.mapping(TOKENS, 18)
    with pytest.raises(InputError, match="mapping is for 18 target tokens and the verifier has 16"):
        check(warm.save(tmp_path / "c", tensors))


@pytest.mark.parametrize("content", [b"", b"\x10", b"not safetensors at all"])
def test_an_unreadable_checkpoint_is_an_input_error(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        check(folder)


def test_pickles_and_missing_files_are_one_sentence(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json: missing, so nothing says what drafter this is"):
        check(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin is a pickle"):
        check(folder)


@pytest.mark.parametrize("norm", [None, "norm_before_fc", "fc_norm"])
def test_the_names_and_shapes_are_those_of_speculators_model(root: Path, norm: str | None) -> None:
    shape = SHAPE.model_copy(update={norm: True} if norm else {})
    fields = {"verifier": str(root / "slipstream/pocket/verifier"), "hidden_size": 8, "vocab_size": 16}
    job = Job.model_construct(**fields, layer_ids=[2, 3, 5], shape=shape, drafter=DrafterConfig(devices=[]))
    with torch.device("meta"):
        made = build.empty(job, 4)
    kept = {name: tuple(value.shape) for name, value in made.state_dict().items()}
    assert {name: kept[name] for name in kept.keys() - set(warm_start_check.OTHERS)} == warm_start_check.trained(
        shape, 8, 3
    )


WORDS = Artifact(path="v", stage="vocabulary", key="k", content="words")
POCKET = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 20}


@pytest.mark.parametrize("early", [True, False])
def test_a_drafter_for_another_hidden_size_is_refused_before_training_starts(
    tmp_path: Path, folder: Path, make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """By the run before its first stage, and by the stage before it starts a process."""

    def never(*given: Any, **more: Any) -> None:
        raise AssertionError("a process starts")

    monkeypatch.setattr(stage.process, "start", never)
    monkeypatch.setattr(stage, "require_complete", lambda folder: None)
    monkeypatch.setattr("slipstream.serving.require_environment", lambda servers: None)
    config = make_config(drafter={"init_from": str(folder), "shape": POCKET}, prompts={"expected_prompts": 10})
    monkeypatch.setattr("slipstream.traces.prompt_set.key", lambda prompts: "k")
    features = Artifact(path=str(tmp_path), stage="features", key="k", content="features")
    started = (
        partial(plan.preflight, config)
        if early
        else partial(stage.run, tmp_path / "work", config, features, WORDS, silent)
    )
    with pytest.raises(InputError, match="hidden_size 8 where this run has 128; vocab_size 16 where this run has 512"):
        started()


def test_a_mapping_to_keep_is_checked_before_the_first_stage(
    tmp_path: Path, make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here with the whole drafter fitting: only its size is not vocabulary.size."""
    monkeypatch.setattr("slipstream.serving.require_environment", lambda servers: None)
    monkeypatch.setattr("slipstream.traces.prompt_set.key", lambda prompts: "k")
    tensors = {name: torch.ones(size) for name, size in warm_start_check.trained(SHAPE, 128, 3).items()}
    tensors |= warm.mapping(list(range(100, 130)), 512)
    warm.save(tmp_path / "c", tensors, warm.flat_config(hidden_size=128, vocab_size=512))
    config = make_config(
        drafter={"init_from": str(tmp_path / "c"), "shape": None},
        vocabulary={"mapping": "init_from", "size": 40},
        prompts={"expected_prompts": 10},
    )
    with pytest.raises(InputError, match=r"vocabulary\.size: 40 is not .* has 30 draft tokens; write 30"):
        plan.preflight(config)
