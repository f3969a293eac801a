"""Samples: which rows, and their tokens as text.  Ids by hand from the pocket verifier's tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.traces import samples
from slipstream.traces.rules import Rules
from slipstream.traces.trace import Trace

POCKET = Path(__file__).parents[3] / "slipstream" / "pocket" / "verifier"
USER, MIDDLE, THINK, THINK_CLOSE, END = 491, 499, 504, 505, 490  # its added_tokens
RULES = Rules(THINK, THINK_CLOSE, (END,))


def token(text: str) -> int:
    """The id of one byte-level token, as the file's vocabulary states it."""
    return int(json.loads((POCKET / "tokenizer.json").read_text())["model"]["vocab"][text])


def trace(output: tuple[int, ...], finish_reason: str = "stop", **more: Any) -> Trace:
    """A trace after the prompt `<|im_user|>a<|im_middle|><think>`."""
    return Trace(
        "k", (USER, token("a"), MIDDLE, THINK), output, finish_reason, **{"thinking": None, "answer": None} | more
    )


def parts(made: Trace, folder: Path = POCKET) -> list[tuple[str, str, int]]:
    """Kind, text and tokens of its segments."""
    (row,) = samples.rendered([("math", made)], RULES, folder)
    return [(part["kind"], part["text"], part["tokens"]) for part in row["segments"]]


def test_supervision_begins_after_the_prompt_and_the_answer_after_the_closing_tag() -> None:
    assert parts(trace((token("b"), token("c"), THINK_CLOSE, token("4"), END), answer="4")) == [
        ("prompt", "<|im_user|>a<|im_middle|><think>", 4),
        ("thinking", "bc</think>", 3),
        ("answer", "4<|im_end|>", 2),
    ]


def test_thinking_that_was_cut_is_no_answer() -> None:
    assert parts(trace((token("b"),), "length"))[1:] == [("thinking", "b", 1)]
    assert parts(trace((token("b"),), "length", answer="b"))[1:] == [("answer", "b", 1)]


def test_an_answer_without_thinking() -> None:
    assert parts(trace((token("4"), END), answer="4"))[1:] == [("answer", "4<|im_end|>", 2)]


@pytest.mark.parametrize("unknown", [508, 163_605, 2**31, 2**40, -1])
def test_an_id_without_a_token_is_shown_not_raised(unknown: int) -> None:
    shown = parts(trace((token("b"), unknown, unknown, THINK_CLOSE, END), answer="x"))
    assert shown[1] == ("thinking", f"b<{unknown}><{unknown}></think>", 4)


def test_bytes_of_half_a_character_are_shown() -> None:
    half = token("Ã")  # byte C3, the first half of é
    assert parts(trace((half, THINK_CLOSE, END), answer="x"))[1] == ("thinking", "\ufffd</think>", 2)


@pytest.mark.parametrize("broken", [None, "{"])
def test_without_a_tokenizer_the_server_s_words_stand_in(tmp_path: Path, broken: str | None) -> None:
    if broken is not None:
        (tmp_path / "tokenizer.json").write_text(broken)
    made = trace((1, THINK_CLOSE, 2, END), thinking="so \ud83d", answer="yes", tool_calls=({"name": "f"},))
    prompt, thinking, answer = parts(made, tmp_path)
    assert prompt[1].startswith("(4 tokens")
    assert thinking == ("thinking", "so ?", 2)
    assert answer == ("answer", 'yes[{"name": "f"}]', 2)


def test_long_text_is_cut_in_its_middle() -> None:
    assert samples.shortened("x" * 2000) == "x" * 2000
    cut = samples.shortened("a" * 1000 + "b" * 7000 + "c" * 1000)
    assert cut == "a" * 1000 + "\n[… 7,000 characters left out …]\n" + "c" * 1000


def chosen(*rows: tuple[str, str, str, int]) -> list[int]:
    """The numbers of the chosen rows among (split, kind, finish reason, turn)."""
    chooser = samples.Chooser()
    for number, (split, kind, finish_reason, turn) in enumerate(rows):
        chooser.offer(split, kind, trace((number,), finish_reason, turn=turn))
    return [made.output_ids[0] for _, made in chooser.chosen()]


def test_the_first_training_row_of_each_domain() -> None:
    rows = [("train", kind, "stop", 0) for kind in "aabbccc"]
    assert chosen(*rows) == [0, 2, 4]
    many = [("train", str(i), "stop", 0) for i in range(9)]
    assert chosen(*many) == [0, 1, 2, 3, 4]


def test_a_truncated_row_and_a_later_turn_always_have_a_place() -> None:
    many = [("train", str(i), "stop", 0) for i in range(9)]
    last = [("train", "0", "stop", 1), ("validation", "0", "length", 0), ("validation", "0", "length", 1)]
    assert chosen(*many, *last) == [0, 1, 2, 9, 10]
    assert chosen(("train", "a", "length", 1), *many) == [0, 1, 2, 3, 4]


def test_one_domain_gives_three_rows_and_no_row_none() -> None:
    assert chosen(*[("train", "all", "stop", 0)] * 8) == [0, 1, 2]
    assert chosen() == []
    assert chosen(("validation", "all", "stop", 0)) == []
