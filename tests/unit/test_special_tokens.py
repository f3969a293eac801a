"""Control tokens: the files, what loads from them and the server agree, or nothing is asked (field report 19)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from slipstream import verifier
from slipstream.errors import InputError
from slipstream.serving import Endpoint
from slipstream.special_tokens import check_loaded, check_served, refuse_differences

NAMES = ("<think>", "</think>", "[PAD]")
PACKED = dict(zip(NAMES, (10, 11, 12), strict=True))
GAPS = dict(zip(NAMES, (13, 14, 25), strict=True))  # as in a vocabulary of 26 of which ten are ordinary


def tokenizer(folder: Path, ids: list[int]) -> list[dict[str, Any]]:
    """A real tokenizer.json of ten ordinary tokens and three special ones that are declared under `ids`."""
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate("abcdefghij")}, merges=[]))
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    made.save(str(folder / "tokenizer.json"))
    content = json.loads((folder / "tokenizer.json").read_text())
    for entry, token in zip(content["added_tokens"], ids, strict=True):
        entry["id"] = token
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return list(content["added_tokens"])


def declare(folder: Path, ids: Mapping[str, int]) -> None:
    """Names special tokens in tokenizer_config.json."""
    decoder = {str(token): {"content": text, "special": True} for text, token in ids.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))


class Served:
    """A server's /tokenize, as the check sees it: special tokens by text, None without such a page."""

    endpoint = Endpoint("http://127.0.0.1:8000/v1", "m")

    def __init__(self, ids: Mapping[str, list[int]] | None, together: list[int] | None = None) -> None:
        self.ids, self.together = ids, together
        self.asked: list[str] = []

    async def tokenize_text(self, text: str) -> list[int] | None:
        """Whole texts that are special tokens one after the other."""
        self.asked.append(text)
        if self.ids is None:
            return None
        if text in self.ids:
            return self.ids[text]
        if self.together is not None:
            return self.together
        return [token for name in NAMES if name in text for token in self.ids[name]]


def served(server: Served, declared: Mapping[str, int] = GAPS) -> bool:
    """What the check of this server says."""
    return asyncio.run(check_served(server, declared))  # type: ignore[arg-type]


def one_sentence(error: InputError, *parts: str) -> None:
    """The message is one line that holds every part."""
    text = str(error)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_gaps_that_are_packed_when_loaded_abort_with_the_three_names(tmp_path: Path) -> None:
    """Field report 19: declared 13, 14, 25 of 26 ids, loaded as 10, 11, 12."""
    tokenizer(tmp_path, [13, 14, 25])
    with pytest.raises(InputError) as caught:
        check_loaded(tmp_path)
    one_sentence(caught.value, "<think> is 13", "</think> is 14", "[PAD] is 25", "and 10 when", "and 11 when", "and 12")


def test_only_the_tokens_that_differ_are_named(tmp_path: Path) -> None:
    tokenizer(tmp_path, [10, 11, 25])
    with pytest.raises(InputError) as caught:
        check_loaded(tmp_path)
    one_sentence(caught.value, "[PAD] is 25")
    assert "think" not in str(caught.value)


def test_a_packed_tokenizer_passes(tmp_path: Path) -> None:
    tokenizer(tmp_path, [10, 11, 12])
    declare(tmp_path, PACKED)
    assert check_loaded(tmp_path) == PACKED


def test_the_intact_pocket_verifier_passes(root: Path) -> None:
    declared = check_loaded(root / "slipstream" / "pocket" / "verifier")
    assert (declared["<think>"], declared["</think>"], declared["<|im_end|>"]) == (504, 505, 490)
    assert len(declared) == 20


def test_files_that_disagree_name_every_token(tmp_path: Path) -> None:
    tokenizer(tmp_path, [10, 11, 12])
    declare(tmp_path, GAPS)
    with pytest.raises(InputError) as caught:
        check_loaded(tmp_path)
    one_sentence(caught.value, *(f"{name} has id {PACKED[name]} here and {GAPS[name]}" for name in NAMES))


def test_a_tokenizer_of_its_own_declares_in_its_configuration_alone(tmp_path: Path) -> None:
    declare(tmp_path, GAPS)
    assert check_loaded(tmp_path) == GAPS


def test_two_tokens_under_one_id_are_refused(tmp_path: Path) -> None:
    tokenizer(tmp_path, [10, 10, 12])
    with pytest.raises(InputError, match="</think> is 10 in the files and 11"):
        check_loaded(tmp_path)


def test_one_token_under_two_ids_is_refused(tmp_path: Path) -> None:
    entries = tokenizer(tmp_path, [10, 11, 12])
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens": [*entries, entries[0] | {"id": 13}]}))
    with pytest.raises(InputError, match="<think> is 13 in the files and 10"):
        check_loaded(tmp_path)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"added_tokens": []}', '{"added_tokens": [], "model": {"type": "None"}}']
)
def test_a_tokenizer_that_does_not_load_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError) as caught:
        check_loaded(tmp_path)
    one_sentence(caught.value, f"{tmp_path / 'tokenizer.json'}: ")


def test_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither tokenizer\.json nor tokenizer_config\.json"):
        check_loaded(tmp_path)


def test_reserved_ids_decode_to_something(tmp_path: Path) -> None:
    """The last part of field report 19: decode([20]) must not raise."""
    tokenizer(tmp_path, [10, 11, 12])
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode([20]) == ""


def test_a_server_that_agrees_is_asked_once() -> None:
    server = Served({name: [token] for name, token in GAPS.items()})
    assert served(server) is True
    assert server.asked == ["<think></think>[PAD]"]


def test_a_server_without_the_page_is_not_judged() -> None:
    assert served(Served(None)) is False


def test_a_server_with_packed_ids_aborts_with_the_three_names() -> None:
    with pytest.raises(InputError) as caught:
        served(Served({name: [token] for name, token in PACKED.items()}))
    one_sentence(
        caught.value,
        *(f"{name} is {GAPS[name]} in the files and {PACKED[name]} on http://127.0.0.1:8000/v1" for name in NAMES),
    )


def test_a_server_that_splits_a_tag_is_told_with_the_pieces() -> None:
    with pytest.raises(InputError) as caught:
        served(Served({"<think>": [1, 2, 3], "</think>": [14], "[PAD]": [25]}))
    one_sentence(caught.value, "<think> is 13 in the files and 1 + 2 + 3 on")
    assert "</think>" not in str(caught.value)


def test_a_server_that_knows_a_token_not_at_all() -> None:
    with pytest.raises(InputError, match=r"\[PAD\] is 25 in the files and unknown on"):
        served(Served({"<think>": [13], "</think>": [14], "[PAD]": []}))


def test_two_swapped_tokens_are_noticed() -> None:
    with pytest.raises(InputError, match="<think> is 13 in the files and 14"):
        served(Served({"<think>": [14], "</think>": [13], "[PAD]": [25]}))


def test_tokens_that_only_differ_when_written_together_are_equal() -> None:
    server = Served({name: [token] for name, token in GAPS.items()}, together=[13, 3, 14, 25])
    assert served(server) is True
    assert server.asked == ["<think></think>[PAD]", *NAMES]


def test_nothing_different_is_no_error() -> None:
    refuse_differences(GAPS, {name: [token] for name, token in GAPS.items()}, "here")


def test_the_files_are_read_ascending_by_id(tmp_path: Path) -> None:
    declare(tmp_path, {"[PAD]": 25, "<think>": 13, "</think>": 14})
    assert list(verifier.special_tokens(tmp_path).items()) == list(GAPS.items())
