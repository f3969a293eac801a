"""What a verifier is, read from its files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from slipstream import verifier
from slipstream.config import RunConfig, VerifierConfig
from slipstream.errors import InputError
from slipstream.verifier import Shape

TEXT = {"hidden_size": 8, "num_hidden_layers": 6, "vocab_size": 26, "eos_token_id": [3, 4]}
SIX = Shape("kimi_k25", 8, 6, 26, (3,))


def write(path: Path, value: Any) -> None:
    """JSON into a file."""
    path.write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny verifier folder."""
    made = tmp_path / "verifier"
    made.mkdir()
    write(made / "config.json", {"model_type": "kimi_k25", "text_config": TEXT})
    write(made / "tokenizer_config.json", {"added_tokens_decoder": {"14": {"content": "</think>"}}})
    write(made / "tokenizer.json", {"added_tokens": [{"id": 14, "content": "</think>"}]})
    write(made / "generation_config.json", {"top_p": 0.9})
    (made / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"w": np.arange(6, dtype=np.float32)}, made / "model.safetensors")
    return made


@pytest.mark.parametrize("config", [TEXT | {"model_type": "kimi_k25"}, {"model_type": "kimi_k25", "text_config": TEXT}])
def test_shape_from_flat_and_nested_fields(config: dict[str, Any]) -> None:
    shape = verifier.shape_of(config, "here")
    assert shape == Shape("kimi_k25", 8, 6, 26, (3, 4))
    assert shape.final_layer_id == 6


@pytest.mark.parametrize(("eos", "expected"), [(3, (3,)), ([3, 4], (3, 4)), (None, ())], ids=["one", "several", "none"])
def test_end_tokens(eos: Any, expected: tuple[int, ...]) -> None:
    assert verifier.shape_of(TEXT | {"eos_token_id": eos}, "here").eos_token_ids == expected


def test_the_nested_fields_win_over_the_top_level() -> None:
    nested = {"hidden_size": 1, "vocab_size": 1, "num_hidden_layers": 1, "text_config": TEXT}
    assert verifier.shape_of(nested, "here").vocab_size == 26


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(InputError, match=f"place.*{field}"):
        verifier.shape_of({name: value for name, value in TEXT.items() if name != field}, "place")


@pytest.mark.parametrize("value", [None, "many", [8]])
def test_a_field_that_is_no_number_is_an_input_error(value: Any) -> None:
    with pytest.raises(InputError, match="hidden_size"):
        verifier.shape_of(TEXT | {"hidden_size": value}, "place")


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_an_unreadable_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        verifier.load_shape(VerifierConfig(path=str(folder)))


def test_a_missing_folder_or_config_is_named(folder: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.*no such verifier folder"):
        verifier.folder_of(VerifierConfig(path=str(folder / "nowhere")))
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json"):
        verifier.folder_of(VerifierConfig(path=str(folder)))


def test_the_published_shape_of_kimi() -> None:
    shape = verifier.published_shape("kimi-k2.5")
    assert (shape.hidden_size, shape.num_layers, shape.vocab_size) == (7168, 61, 163840)
    assert shape.final_layer_id == 61
    with pytest.raises(InputError, match=r"kimi-k2\.5"):
        verifier.published_shape("kimi-k9")


def test_special_tokens_are_those_of_the_loaded_tokenizer(root: Path) -> None:
    pocket = root / "slipstream" / "pocket" / "verifier"
    tokenizer = AutoTokenizer.from_pretrained(pocket)
    found = verifier.special_tokens(pocket)
    assert found == tokenizer.get_added_vocab()
    assert {"<think>", "</think>", "<|im_end|>", "<|tool_calls_section_begin|>"} <= found.keys()
    assert list(found.values()) == sorted(found.values())
    assert {text: tokenizer.encode(text, add_special_tokens=False) for text in found} == {
        text: [token] for text, token in found.items()
    }


@pytest.mark.parametrize("kept", ["tokenizer.json", "tokenizer_config.json"])
def test_one_tokenizer_file_is_enough(folder: Path, kept: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if name != kept:
            (folder / name).unlink()
    assert verifier.special_tokens(folder) == {"</think>": 14}


def test_disagreeing_tokenizer_files_are_refused(folder: Path) -> None:
    write(folder / "tokenizer.json", {"added_tokens": [{"id": 11, "content": "</think>"}]})
    with pytest.raises(InputError, match=r"</think> has id 11 here and 14"):
        verifier.special_tokens(folder)


def test_no_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="no tokenizer"):
        verifier.special_tokens(folder)


def test_the_final_state_is_captured_after_the_auxiliary_ones() -> None:
    assert verifier.capture_ids([1, 3, 5], SIX) == [1, 3, 5, 6]
    assert verifier.capture_ids([2, 30, 58], verifier.published_shape("kimi-k2.5")) == [2, 30, 58, 61]


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (0, "0 is not an auxiliary layer .* from 1 to 5"),
        (6, "6 is the final state .* captured by itself; auxiliary ids go up to 5"),
        (7, "7 is not an auxiliary layer .* from 1 to 5"),
        (-1, "-1 is not an auxiliary layer .* from 1 to 5"),
    ],
)
def test_ids_that_are_no_auxiliary_layer_are_refused(layer: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        verifier.capture_ids([layer], SIX)


def rewrite(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Replaces text in one file."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def other_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["w"][3] += 1
    save_file(tensors, folder / "model.safetensors")


CHANGES = {
    "config": rewrite("config.json", '"vocab_size": 26', '"vocab_size": 27'),
    "template": rewrite("chat_template.jinja", "messages", "messages[1:]"),
    "tokenizer": rewrite("tokenizer.json", "14", "15"),
    "special tokens": rewrite("tokenizer_config.json", "14", "15"),
    "weight": other_weight,
    # vLLM takes the default sampling (top_p, repetition_penalty) and further end tokens from it
    "generation defaults": rewrite("generation_config.json", "0.9", "0.5"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_identity_follows_what_the_verifier_is(folder: Path, what: str) -> None:
    config = VerifierConfig(path=str(folder))
    before = verifier.identity(config)
    CHANGES[what](folder)
    assert verifier.identity(config) != before


def test_identity_follows_the_revision(folder: Path) -> None:
    identities = {verifier.identity(VerifierConfig(path=str(folder), revision=name)) for name in (None, "a", "b")}
    assert len(identities) == 3


def test_identity_ignores_place_and_time(folder: Path, tmp_path: Path) -> None:
    before = verifier.identity(VerifierConfig(path=str(folder)))
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    (folder / "README.md").write_text("words")
    assert verifier.identity(VerifierConfig(path=str(folder))) == before
    shutil.copytree(folder, tmp_path / "copy")
    assert verifier.identity(VerifierConfig(path=str(tmp_path / "copy"))) == before


def test_identity_of_large_weights_sees_size_header_and_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "HASHED_WHOLE", 0)
    config, path = VerifierConfig(path=str(folder)), folder / "model.safetensors"
    save_file({"w": np.zeros(600_000, dtype=np.float32)}, path)
    seen = {verifier.identity(config)}
    save_file({"v": np.zeros(600_000, dtype=np.float32)}, path)  # another header
    seen.add(verifier.identity(config))
    save_file({"v": np.zeros(700_000, dtype=np.float32)}, path)  # another size
    seen.add(verifier.identity(config))
    save_file({"v": np.append(np.zeros(699_999, dtype=np.float32), np.float32(1))}, path)  # another last weight
    seen.add(verifier.identity(config))
    assert len(seen) == 4


def test_no_weights_no_identity(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no weights"):
        verifier.identity(VerifierConfig(path=str(folder)))


def test_check_accepts_the_pocket_verifier(make_config: Callable[..., RunConfig]) -> None:
    shape = verifier.check(make_config())
    assert (shape.hidden_size, shape.num_layers, shape.vocab_size) == (128, 6, 512)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"features": {"layer_ids": [2, 6]}}, "features.layer_ids: 6 is the final state"),
        ({"vocabulary": {"size": 513}}, "vocabulary.size: 513 .* 512"),
        ({"vocabulary": {"size": 5}}, "vocabulary.size: 5 is smaller than the 20 control tokens"),
        ({"vocabulary": {"must_keep": [512]}}, r"vocabulary.must_keep: .*512"),
        ({"vocabulary": {"must_keep": [-1]}}, r"vocabulary.must_keep: .*-1"),
    ],
)
def test_check_refuses_what_the_verifier_cannot(
    make_config: Callable[..., RunConfig], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        verifier.check(make_config(**changes))


def test_reasoning_needs_a_closing_token(folder: Path, make_config: Callable[..., RunConfig]) -> None:
    write(folder / "tokenizer.json", {"added_tokens": [{"id": 3, "content": "end"}]})
    (folder / "tokenizer_config.json").unlink()
    changes: dict[str, Any] = {"verifier": {"path": str(folder)}, "vocabulary": {"size": 20}}
    with pytest.raises(InputError, match="no </think> token"):
        verifier.check(make_config(**changes))
    assert verifier.check(make_config(**changes, traces={"reasoning": False})).vocab_size == 26
