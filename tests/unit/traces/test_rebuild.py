"""Token ids from texts: those that the model must have produced, or a row that is set aside."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from slipstream.chat import Answer, Message, Refused
from slipstream.config import VerifierConfig
from slipstream.errors import InputError
from slipstream.local_tokenizer import LocalTokenizer
from slipstream.traces.rebuild import Renderer, rebuild, renderer_for
from slipstream.traces.sampling import NO_THINKING
from slipstream.traces.trace import MISMATCHED, REBUILT

POCKET = Path(__file__).parents[3] / "slipstream" / "pocket" / "verifier"
QUESTION = [{"role": "user", "content": "How much is 2 + 2?"}]
ASKED = "<|im_user|>user<|im_middle|>How much is 2 + 2?<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
CLOSE, END = 505, 490


@pytest.fixture(scope="module")
def local() -> LocalTokenizer:
    """The pocket verifier's files."""
    return LocalTokenizer(VerifierConfig(path=str(POCKET)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The same files in the library below transformers, which knows no chat template."""
    return Tokenizer.from_file(str(POCKET / "tokenizer.json"))


def ids_of(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Tokens of a text in which control tokens stand by name."""
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def got(answer: str | None, thinking: str | None = None, finish_reason: str = "stop", **more: Any) -> Answer:
    """An answer without ids."""
    return Answer(None, None, finish_reason, thinking, answer, **more)


def rebuilt(
    renderer: Renderer, answer: Answer, usage: tuple[int, int] | None, template: Mapping[str, Any] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """The ids of an answer to QUESTION for which the server counted `usage`."""
    counted = Answer(**{**answer.__dict__, "usage": usage})
    return asyncio.run(rebuild(renderer, QUESTION, [], template or {}, counted))


def test_ids_that_the_counts_confirm(local: LocalTokenizer, tokenizer: Tokenizer) -> None:
    prompt = ids_of(tokenizer, ASKED)
    output = (*ids_of(tokenizer, "2 and 2 is 4"), CLOSE, *ids_of(tokenizer, "It is 4."), END)
    answer = got("It is 4.", "2 and 2 is 4")
    assert rebuilt(local, answer, (len(prompt), len(output))) == (prompt, output, REBUILT)


def test_they_are_those_of_the_chat_template(local: LocalTokenizer) -> None:
    from transformers import AutoTokenizer

    said = {"role": "assistant", "content": "It is 4.", "reasoning_content": "2 and 2 is 4"}
    whole = AutoTokenizer.from_pretrained(POCKET).apply_chat_template([*QUESTION, said], return_dict=False)
    prompt, output, _ = rebuilt(local, got("It is 4.", "2 and 2 is 4"), None)
    assert [*prompt, *output] == whole


@pytest.mark.parametrize(
    ("prompt_more", "output_more"), [(0, 1), (0, -1), (1, 0), (-1, 0), (1, -1)], ids=lambda more: f"{more:+d}"
)
def test_other_counts_are_a_mismatch(
    local: LocalTokenizer, tokenizer: Tokenizer, prompt_more: int, output_more: int
) -> None:
    prompt, output = ids_of(tokenizer, ASKED), ids_of(tokenizer, "hm</think>4<|im_end|>")
    usage = (len(prompt) + prompt_more, len(output) + output_more)
    assert rebuilt(local, got("4", "hm"), usage) == (prompt, output, MISMATCHED)


def test_a_server_that_counts_nothing_confirms_nothing(local: LocalTokenizer) -> None:
    assert rebuilt(local, got("4", "hm"), None)[2] == MISMATCHED


def test_an_answer_cut_in_its_thinking_stays_open(local: LocalTokenizer, tokenizer: Tokenizer) -> None:
    prompt, output = ids_of(tokenizer, ASKED), ids_of(tokenizer, "2 and then")
    answer = got(None, "2 and then", "length")
    assert rebuilt(local, answer, (len(prompt), len(output))) == (prompt, output, REBUILT)
    assert CLOSE not in output
    assert END not in output


def test_an_answer_cut_after_its_thinking_has_no_end(local: LocalTokenizer, tokenizer: Tokenizer) -> None:
    prompt = ids_of(tokenizer, ASKED)
    output = (*ids_of(tokenizer, "hm"), CLOSE, *ids_of(tokenizer, "It is"))
    answer = got("It is", "hm", "length")
    assert rebuilt(local, answer, (len(prompt), len(output))) == (prompt, output, REBUILT)


def test_nothing_at_all_is_no_tokens(local: LocalTokenizer, tokenizer: Tokenizer) -> None:
    prompt = ids_of(tokenizer, ASKED)
    assert rebuilt(local, got(None, None, "length"), (len(prompt), 0)) == (prompt, (), REBUILT)


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_an_answer_asked_without_thinking(local: LocalTokenizer, tokenizer: Tokenizer, finish_reason: str) -> None:
    prompt = ids_of(tokenizer, f"{ASKED}</think>")
    output = (*ids_of(tokenizer, "It is 4."), *([END] if finish_reason == "stop" else []))
    answer = got("It is 4.", None, finish_reason)
    assert rebuilt(local, answer, (len(prompt), len(output)), NO_THINKING) == (prompt, output, REBUILT)


def test_a_tool_call_as_the_template_writes_it(local: LocalTokenizer, tokenizer: Tokenizer) -> None:
    call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    declared = (
        '<|im_system|>tool_declare<|im_middle|>[{"type": "function", "function": {"name": "add", "parameters": {}}}]'
        "<|im_end|>"
    )
    text = (
        "hm</think><|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )
    prompt, output = ids_of(tokenizer, declared + ASKED), ids_of(tokenizer, text)
    answer = got(None, "hm", "tool_calls", tool_calls=(call,), usage=(len(prompt), len(output)))
    assert asyncio.run(rebuild(local, QUESTION, [tool], {}, answer)) == (prompt, output, REBUILT)


def test_text_alone_gets_nothing_added(local: LocalTokenizer, tokenizer: Tokenizer) -> None:
    text = "</think>4<|im_end|>"
    assert asyncio.run(local.tokenize_text(text)) == [CLOSE, *ids_of(tokenizer, "4"), END]


class Merging:
    """Field report 11: the vocabulary h, e, l, o, he, ll, llo, hello, encoded by the longest piece."""

    PIECES = ("h", "e", "l", "o", "he", "ll", "llo", "hello")

    async def tokenize_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        template: Mapping[str, Any],
        generation_prompt: bool = True,
    ) -> list[int]:
        """The texts one after the other, without any frame."""
        del tools, template, generation_prompt
        return await self.tokenize_text("".join(message["content"] for message in messages))

    async def tokenize_text(self, text: str) -> list[int]:
        """Longest piece first."""
        ids: list[int] = []
        while text:
            piece = max((piece for piece in self.PIECES if text.startswith(piece)), key=len)
            ids.append(self.PIECES.index(piece))
            text = text[len(piece) :]
        return ids


@pytest.mark.parametrize(("counted", "verdict"), [(2, MISMATCHED), (1, REBUILT)])
def test_pieces_that_merge_when_encoded_again_are_noticed(counted: int, verdict: str) -> None:
    """The model sampled he and llo, [4, 6]; its text encodes to hello, [7]."""
    answer = got("hello", usage=(1, counted))
    asked = [{"role": "user", "content": "o"}]
    assert asyncio.run(rebuild(Merging(), asked, [], {}, answer)) == ((3,), (7,), verdict)


class Rewriting(Merging):
    """A template that renders history otherwise than it was asked."""

    async def tokenize_chat(self, messages: Sequence[Message], *_: Any, generation_prompt: bool = True) -> list[int]:
        """The question changes as soon as it is answered."""
        return [1, 2] if generation_prompt else [1, 3, 4]


def test_a_template_that_rewrites_the_question_gives_no_row() -> None:
    assert asyncio.run(rebuild(Rewriting(), QUESTION, [], {}, got("a", usage=(2, 1)))) == ((1, 2), (), MISMATCHED)


class Mute(Merging):
    """A renderer that stopped answering."""

    async def tokenize_chat(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        """Nothing."""

    async def tokenize_text(self, text: str) -> None:  # type: ignore[override]
        """Nothing."""


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_renderer_that_does_not_answer_gives_no_row(finish_reason: str) -> None:
    answer = got("hello", None, finish_reason, usage=(1, 1))
    assert asyncio.run(rebuild(Mute(), QUESTION, [], {}, answer)) == ((), (), MISMATCHED)


class Engine:
    """A server whose /tokenize answers conversations in one way."""

    def __init__(self, answer: list[int] | Exception | None) -> None:
        self.answer = answer

    async def tokenize_chat(self, *_: Any, **__: Any) -> list[int] | None:
        """What it was made to say."""
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def renderer_of(engine: Engine, folder: Path = POCKET) -> Any:
    """The renderer that is chosen beside this server."""
    return asyncio.run(renderer_for(engine, VerifierConfig(path=str(folder))))  # type: ignore[arg-type]


def test_a_server_that_tokenizes_conversations_renders() -> None:
    engine = Engine([1, 2])
    assert renderer_of(engine) is engine


@pytest.mark.parametrize("answer", [None, [], Refused("HTTP 400: no prompt")], ids=["no page", "nothing", "refused"])
def test_else_the_verifiers_files_do(answer: list[int] | Exception | None) -> None:
    assert isinstance(renderer_of(Engine(answer)), LocalTokenizer)


def test_a_tokenizer_that_does_not_load_is_one_sentence(tmp_path: Path) -> None:
    shutil.copy(POCKET / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError) as caught:
        renderer_of(Engine(None), tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: its tokenizer does not load here")
    assert "use a server that returns token ids" in str(caught.value)
