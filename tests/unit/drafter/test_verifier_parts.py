"""The verifier's parts inside a speculators drafter: the right rows, norm and flags, where the naive load is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig

from slipstream.config import DrafterConfig, DraftShape
from slipstream.drafter import build, verifier_parts
from slipstream.drafter.job import Job
from slipstream.errors import InputError
from slipstream.features.recipe import POST_NORM, PRE_NORM
from tests.unit.verifier_ends.layouts import DECOY, EMBEDDING, HEAD, NORM, TEXT, TOKENS, ends, ramp, write
from tests.unit.verifier_ends.test_layouts import BESIDE, KIMI, NESTED

KEPT = [0, 3, 4, 7]
SMALL = {
    "vocab_size": TOKENS, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4,
    "num_attention_heads": 1, "num_key_value_heads": 1,
}  # fmt: skip
SHAPE = DraftShape(num_attention_heads=1, num_key_value_heads=1, head_dim=4, intermediate_size=8, rms_norm_eps=1e-3)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """A job whose drafter keeps the tokens KEPT, or all of them."""

    def make(verifier: Path, final_state: str = PRE_NORM, kept: list[int] = KEPT, **changes: Any) -> Job:
        words = tmp_path / "vocabulary"
        words.mkdir(exist_ok=True)
        np.save(words / "t2d.npy", np.isin(np.arange(TOKENS), kept))
        np.save(words / "d2t.npy", np.array(kept) - np.arange(len(kept)))
        drafter = DrafterConfig(shape=SHAPE, devices=[], **changes)
        return Job(
            verifier=str(verifier), features="", vocabulary=str(words), checkpoints="", metrics="", layer_ids=[1],
            hidden_size=4, vocab_size=TOKENS, train_rows=1, rows=2, final_state=final_state, shape=SHAPE,
            drafter=drafter,
        )  # fmt: skip

    return make


def parts(model: Any) -> tuple[torch.Tensor, ...]:
    """Embedding, both heads and the final norm."""
    modules = (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm)
    return tuple(module.weight.detach() for module in modules)


def test_a_kimi_like_checkpoint_with_decoys_gives_its_own_rows(job: Callable[..., Job], tmp_path: Path) -> None:
    model = build.build(job(write(tmp_path / "verifier", NESTED, KIMI | BESIDE)), "cpu")
    embedding, head, targets, norm = parts(model)
    assert torch.equal(embedding, EMBEDDING)
    assert torch.equal(head, HEAD[KEPT])
    assert torch.equal(targets, HEAD[KEPT])
    assert torch.equal(norm, NORM)
    assert model.verifier_norm.variance_epsilon == 1e-5  # the verifier's; the drafter's is 1e-3
    assert model.norm.variance_epsilon == 1e-3


def test_speculators_own_loader_takes_the_decoys(job: Callable[..., Job], tmp_path: Path) -> None:
    """Why it is not used: the drafter would learn another part's words, without an error."""
    wanted = job(write(tmp_path / "verifier", NESTED, KIMI | BESIDE))
    naive = build.empty(wanted, len(KEPT))
    naive.load_vocab_mappings(torch.isin(torch.arange(TOKENS), torch.tensor(KEPT)), torch.tensor([0, 2, 2, 4]))
    naive._load_verifier_weights()
    embedding, head, _, norm = parts(naive)
    assert torch.equal(embedding, DECOY)
    assert torch.equal(head, DECOY[KEPT])
    assert not torch.equal(norm, NORM)


def test_a_whole_vocabulary_has_no_mapping(job: Callable[..., Job], tmp_path: Path) -> None:
    model = build.build(job(write(tmp_path / "verifier", TEXT, ends()), kept=list(range(TOKENS))), "cpu")
    assert model.t2d is None
    assert torch.equal(parts(model)[1], HEAD)


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_trained(trained: bool, job: Callable[..., Job], tmp_path: Path) -> None:
    """speculators 0.9.0 freezes embedding, both heads and the verifier's norm; 0.3.0 trained the head."""
    model = build.build(job(write(tmp_path / "verifier", TEXT, ends()), train_lm_head=trained), "cpu")
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    always = {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert frozen == always | (set() if trained else {"lm_head.weight"})
    before = [part.clone() for part in parts(model)]
    model.lm_head.weight.data += 1  # the two heads are two tensors: targets stay the verifier's
    assert torch.equal(parts(model)[2], before[2])
    assert {"lm_head.weight", "embed_tokens.weight"} <= model.state_dict().keys()


def test_blocks_of_rows_fill_the_heads(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.verifier_ends.matrix.BLOCK_ROWS", 3)
    embedding, head, targets, _ = parts(build.build(job(write(tmp_path / "verifier", TEXT, ends())), "cpu"))
    assert torch.equal(embedding, EMBEDDING)
    assert torch.equal(head, HEAD[KEPT])
    assert torch.equal(targets, HEAD[KEPT])


@pytest.mark.parametrize("final_state", [PRE_NORM, POST_NORM])
@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, final_logit_softcapping=0.5),
        GraniteConfig(**SMALL, tie_word_embeddings=False, logits_scaling=8.0),
    ],
    ids=["gemma2", "granite"],
)
def test_targets_are_the_familys_logits(config: Any, final_state: str, job: Callable[..., Job], tmp_path: Path) -> None:
    """1 + weight, soft cap and multiplier: speculators' targets equal transformers' logits for kept tokens."""
    torch.manual_seed(0)
    verifier = AutoModelForCausalLM.from_config(config).float().eval()
    verifier.model.norm.weight.data.uniform_(0.3, 2)
    seen: list[torch.Tensor] = []
    hook = {
        PRE_NORM: lambda module, args, out: seen.append(args[0]),
        POST_NORM: lambda module, args, out: seen.append(out),
    }
    verifier.model.norm.register_forward_hook(hook[final_state])
    with torch.no_grad():
        logits = verifier(torch.tensor([[1, 5, 2]])).logits[0]
    verifier.save_pretrained(tmp_path / "verifier")
    model = build.build(job(tmp_path / "verifier", final_state), "cpu")
    with torch.no_grad():
        targets = model.verifier_lm_head(model.verifier_norm(seen[0][0]))
    torch.testing.assert_close(targets, logits[:, KEPT], rtol=1e-5, atol=1e-6)
    assert {name for name in model.state_dict() if "verifier" in name} == {
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        (TEXT, ends(head=None), r"verifier: .*no lm_head\.weight .*tie_word_embeddings is false"),
        (TEXT | {"vocab_size": 9}, ends(), r"has 8 rows .* is 9"),
        (TEXT | {"vocab_size": 7}, ends(), "7 tokens of width 4, the drafter 8 of 4"),
        (TEXT, ends() | {"lm_head.weight": torch.where(HEAD < -2.9, torch.nan, HEAD)}, r"row 0 of lm_head"),
        (TEXT, ends(head="lm_head.qweight"), "quantised as gptq or awq"),
        (TEXT | {"hidden_size": 5}, ends() | {"x.weight": ramp(0)}, r"\[8, 4\] and the verifier's hidden_size is 5"),
    ],
    ids=["untied", "few rows", "another vocabulary", "damaged", "gptq", "another width"],
)
def test_a_verifier_that_does_not_fit_is_an_input_error(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], words: str, job: Callable[..., Job], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        build.build(job(write(tmp_path / "verifier", config, tensors)), "cpu")


def test_a_model_on_the_meta_device_is_built_without_a_verifier(job: Callable[..., Job], tmp_path: Path) -> None:
    with torch.device("meta"):
        model = build.empty(job(tmp_path / "nowhere"), len(KEPT))
    verifier_parts.load(model, tmp_path / "nowhere", PRE_NORM)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight.shape == (4, 4)
