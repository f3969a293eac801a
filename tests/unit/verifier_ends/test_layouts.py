"""Field report 38: the right embedding, head and norm in every layout of a checkpoint, or a refusal by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from speculators.utils.loading import load_model_layers

from slipstream.verifier_ends import Unreadable, read_embedding, read_head
from tests.unit.verifier_ends.layouts import DECOY, DECOY_NORM, EMBEDDING, HEAD, NORM, TEXT, TOKENS, ends, ramp, write

Tensors = dict[str, torch.Tensor]
TIED = TEXT | {"tie_word_embeddings": True}
NESTED = {"model_type": "kimi_k25", "text_config": TEXT}
KIMI = ends("language_model.model.", "language_model.lm_head.weight")
SINGLE = "model.safetensors"
# What stands beside the language model in published checkpoints (DeepSeek-V3, Qwen3-Next, Qwen3-VL, Llama 4,
# Gemma 3, Qwen2.5-Omni) and ends like one of the three.
BESIDE: Tensors = {
    "model.layers.61.embed_tokens.weight": DECOY,
    "model.layers.61.shared_head.head.weight": DECOY,
    "model.layers.61.shared_head.norm.weight": DECOY_NORM,
    "model.layers.0.self_attn.norm.weight": DECOY_NORM,
    "mtp.norm.weight": DECOY_NORM,
    "mtp.embed_tokens.weight": DECOY,
    "mtp.lm_head.weight": DECOY,
    "visual.norm.weight": DECOY_NORM,
    "visual.embed_tokens.weight": DECOY,
    "vision_model.norm.weight": DECOY_NORM,
    "model.vision_tower.vision_model.norm.weight": DECOY_NORM,
    "audio_tower.embed_tokens.weight": DECOY,
    "multi_modal_projector.norm.weight": DECOY_NORM,
    "talker.model.embed_tokens.weight": DECOY,
    "talker.model.norm.weight": DECOY_NORM,
    "talker.lm_head.weight": DECOY,
}

LAYOUTS: dict[str, tuple[dict[str, Any], Tensors, str | None]] = {
    "sharded": (TEXT, ends(), None),
    "one file": (TEXT, ends(), SINGLE),
    "one file of another name": (TEXT, ends(), "weights.safetensors"),
    "nested and prefixed (Kimi-K2.5, Llama 4)": (NESTED, KIMI, None),
    "the language model inside (Qwen3-VL)": (NESTED, ends("model.language_model."), None),
    "inside a thinker (Qwen2.5-Omni)": (NESTED, ends("thinker.model.", "thinker.lm_head.weight"), SINGLE),
    "any prefix": (TEXT, ends("a.b.model.", "a.b.lm_head.weight"), SINGLE),
    "no prefix": (TEXT, ends(""), SINGLE),
    "Mistral's names": (
        TEXT, {"tok_embeddings.weight": EMBEDDING, "output.weight": HEAD, "norm.weight": NORM},
        "consolidated.safetensors",
    ),
    "llm's names": (TEXT, {"llm.embed.weight": EMBEDDING, "llm.unembed.weight": HEAD, "llm.norm.weight": NORM}, SINGLE),
    "Nemotron-H's names": (
        TEXT | {"model_type": "nemotron_h", "layer_norm_epsilon": 1e-5},
        {"backbone.embeddings.weight": EMBEDDING, "lm_head.weight": HEAD, "backbone.norm_f.weight": NORM},
        SINGLE,
    ),
    "fields at the top level": (
        {"vocab_size": TOKENS, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
         "text_config": {"hidden_size": 4, "num_hidden_layers": 2}},
        ends(), SINGLE,
    ),
    "padded rows": (
        TEXT,
        {"lm_head.weight": torch.cat([HEAD, DECOY]), "model.norm.weight": NORM,
         "model.embed_tokens.weight": torch.cat([EMBEDDING, DECOY])},
        SINGLE,
    ),
    "half precision": (TEXT, {name: tensor.bfloat16() for name, tensor in ends().items()}, SINGLE),
    "prediction layers and towers": (TEXT, ends() | BESIDE, None),
    "prediction layers and towers, prefixed": (NESTED, KIMI | BESIDE, None),
    "prediction layers and towers, inside": (NESTED, ends("model.language_model.") | BESIDE, None),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_38_the_three_tensors_of_a_layout(name: str, tmp_path: Path) -> None:
    head = read_head(write(tmp_path, *LAYOUTS[name]))
    assert torch.equal(head.matrix.rows(0, head.vocabulary), HEAD)
    assert torch.equal(head.gain, NORM)
    assert (head.eps, head.vocabulary) == (1e-5, TOKENS)
    assert torch.equal(read_embedding(tmp_path).rows(0, TOKENS), EMBEDDING)
    assert torch.equal(read_embedding(tmp_path).take([5, 0, 5]), EMBEDDING[[5, 0, 5]])


@pytest.mark.parametrize("beside", [{}, {"lm_head.weight": DECOY}, BESIDE], ids=["none", "stale", "others"])
@pytest.mark.parametrize("place", ["inner", "outer", "class"])
def test_38_a_tied_head_is_the_embedding(place: str, beside: Tensors, tmp_path: Path) -> None:
    """Also where the checkpoint has a head of its own: transformers and vLLM do not look at it."""
    silent = {name: value for name, value in TEXT.items() if name != "tie_word_embeddings"}
    config: dict[str, Any] = {
        "inner": {"text_config": TIED},
        "outer": {"text_config": silent, "tie_word_embeddings": True},
        "class": {"text_config": silent | {"model_type": "gemma3_text"}},  # transformers' class says it
    }[place]
    head = read_head(write(tmp_path, config, ends(head=None) | beside, SINGLE))
    assert torch.equal(head.matrix.rows(0, TOKENS), EMBEDDING)


@pytest.mark.parametrize(
    "config", [TEXT, {"text_config": TEXT}, {"text_config": {n: v for n, v in TEXT.items() if "tie" not in n}}]
)
def test_38_an_untied_verifier_without_a_head_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    """The fifth folder of the report; speculators' loader takes the embedding instead."""
    write(tmp_path, config, ends(head=None) | BESIDE, SINGLE)
    with pytest.raises(Unreadable, match=r"no lm_head\.weight .*tie_word_embeddings"):
        read_head(tmp_path)


def test_38_the_naive_suffix_match_takes_other_parts_tensors(tmp_path: Path) -> None:
    """What speculators 0.9.0 reads of a Kimi-like checkpoint with prediction layers and a vision model."""
    write(tmp_path, NESTED, KIMI | BESIDE)
    naive = load_model_layers(["embed_tokens.weight", "lm_head.weight", "model.norm.weight"], str(tmp_path))
    assert torch.equal(naive["embed_tokens.weight"], DECOY)
    assert torch.equal(naive["lm_head.weight"], DECOY)
    assert torch.equal(naive["model.norm.weight"], DECOY_NORM)
    head = read_head(tmp_path)
    assert torch.equal(head.matrix.rows(0, TOKENS), HEAD)
    assert torch.equal(head.gain, NORM)


def test_the_index_counts_and_not_what_else_lies_there(tmp_path: Path) -> None:
    """Mistral's repositories carry the weights a second time as consolidated.safetensors."""
    write(tmp_path, TEXT, ends())
    save_file({"tok_embeddings.weight": DECOY, "output.weight": DECOY.clone()}, tmp_path / "consolidated.safetensors")
    assert torch.equal(read_head(tmp_path).matrix.rows(0, TOKENS), HEAD)


def test_an_index_of_another_name(tmp_path: Path) -> None:
    write(tmp_path, TEXT, ends())
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "language.safetensors.index.json")
    assert torch.equal(read_head(tmp_path).matrix.rows(0, TOKENS), HEAD)


def edited(change: Callable[[dict[str, Any], Tensors], None]) -> tuple[dict[str, Any], Tensors]:
    """The plain layout, changed."""
    config, tensors = dict(TEXT), ends()
    change(config, tensors)
    return config, tensors


REFUSED: dict[str, tuple[Callable[[dict[str, Any], Tensors], Any], str]] = {
    "a head with fewer rows": (
        lambda config, held: held.update({"lm_head.weight": HEAD[:7]}), r"lm_head\.weight has 7 rows .* is 8",
    ),
    "an embedding with fewer rows": (
        lambda config, held: held.update({"model.embed_tokens.weight": EMBEDDING[:5]}), r"embed_tok.* 5 rows .* is 8",
    ),
    "another width": (
        lambda config, held: held.update({"lm_head.weight": ramp(1, 8, 3)}), r"lm_head\.weight is \[8, 3\] .* is 4",
    ),
    "a norm of another width": (
        lambda config, held: held.update({"model.norm.weight": NORM[:3]}), r"model\.norm\.weight is F32 \[3\] .* is 4",
    ),
    "no norm": (lambda config, held: held.pop("model.norm.weight"), r"no model\.norm\.weight"),
    "only another part's norm": (
        lambda config, held: held.update({"mtp.norm.weight": held.pop("model.norm.weight")}),
        r"no model\.norm\.weight of the language model \(mtp\.norm\.weight belongs to another part\)",
    ),
    "no embedding": (lambda config, held: held.pop("model.embed_tokens.weight"), r"no embed_tokens\.weight"),
    "two language models": (
        lambda config, held: held.update({f"second.{name}": tensor for name, tensor in ends().items()}),
        r"model\.embed_tokens and second\.model\.embed_tokens: which one",
    ),
    "two heads": (
        lambda config, held: held.update({"model.lm_head.weight": HEAD}), r"lm_head and model\.lm_head: which one",
    ),
    "a head with a bias": (
        lambda config, held: held.update({"lm_head.bias": NORM}), "lm_head has a bias",
    ),
    "a layer norm": (
        lambda config, held: held.update({"model.norm.bias": NORM}), "model.norm has a bias: .* no RMS norm",
    ),
    "no epsilon": (lambda config, held: config.pop("rms_norm_eps"), "no rms_norm_eps"),
    "a row that is no number": (
        lambda config, held: held.update({"lm_head.weight": torch.where(HEAD[6, 1] == HEAD, torch.nan, HEAD)}),
        r"row 6 of lm_head\.weight in model\.safetensors is not finite",
    ),
}  # fmt: skip


def read_all(folder: Path) -> None:
    """Every row of both ends."""
    read_head(folder).matrix.rows(0, TOKENS)
    read_embedding(folder).rows(0, TOKENS)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_both_values(name: str, tmp_path: Path) -> None:
    config, tensors = edited(REFUSED[name][0])
    write(tmp_path, config, tensors, SINGLE)
    with pytest.raises(Unreadable, match=REFUSED[name][1]):
        read_all(tmp_path)


def _shard_lost(folder: Path) -> None:
    next(iter(folder.glob("*-of-*"))).unlink()


def _two_indexes(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    for name in "ab":
        shutil.copy(index, folder / f"{name}.safetensors.index.json")
    index.unlink()


def _shard_cut(folder: Path) -> None:
    for path in folder.glob("*-of-*"):
        path.write_bytes(path.read_bytes()[:-4])


def _index(change: Mapping[str, str]) -> Callable[[Path], None]:
    def write_index(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | change}))

    return write_index


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_shard_lost, r"in model-0000\d-of-00003\.safetensors cannot be read"),
        (_shard_cut, "cannot be read"),
        (_index({"model.norm.weight": "../norm.safetensors"}), "names ../norm.safetensors, which lies outside"),
        (_index({"model.norm.weight": "model-00001-of-00003.safetensors"}), r"model\.norm\.weight .*cannot be read"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "cannot be read"),
        (
            _two_indexes,
            r"several indexes \(a\.safetensors\.index\.json, b\.",
        ),
    ],
    ids=["lost", "cut", "outside", "elsewhere", "broken", "list", "two"],
)
def test_damaged_folders_are_named(damage: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    damage(write(tmp_path, TEXT, ends()))
    with pytest.raises(Unreadable, match=words):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model.gguf", r"GGUF \(model\.gguf\)"),
        ("pytorch_model.bin", "pickled PyTorch files"),
        (None, r"no \.safetensors"),
    ],
)
def test_weights_in_other_files_are_named(file: str | None, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    if file:
        (tmp_path / file).write_bytes(b"x")
    with pytest.raises(Unreadable, match=words):
        read_head(tmp_path)


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    write(tmp_path, TEXT, ends(), "a.safetensors")
    save_file(ends(), tmp_path / "b.safetensors")
    with pytest.raises(Unreadable, match=r"lies in a\.safetensors and in b\.safetensors"):
        read_head(tmp_path)
