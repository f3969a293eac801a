"""The committed tokenizer: one id a control token, digits apart, lossless, Kimi's chat form."""

import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.pocket import VERIFIER
from slipstream.pocket.curriculum import generate
from slipstream.pocket.traces import encode, output_text, prompt_text

CONTROL = [
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|media_pad|>",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(VERIFIER)


def test_control_tokens_have_one_id_each_and_their_ids_agree_with_the_config(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    stated = json.loads((VERIFIER / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    config = json.loads((VERIFIER / "config.json").read_text())
    ids = {}
    for token in CONTROL:
        (ids[token],) = tokenizer.encode(token, add_special_tokens=False)
        assert stated[str(ids[token])]["content"] == token
        assert tokenizer.decode([ids[token]]) == token
    assert len(set(ids.values())) == len(CONTROL)
    assert (
        tokenizer.eos_token_id == config["eos_token_id"] == config["text_config"]["eos_token_id"] == ids["<|im_end|>"]
    )
    assert tokenizer.pad_token_id == config["pad_token_id"] == ids["[PAD]"]
    assert config["media_placeholder_token_id"] == ids["<|media_pad|>"]
    assert max(ids.values()) < config["text_config"]["vocab_size"] == 512
    assert len(tokenizer) < 512


def test_think_tokens_survive_skipping_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode("<think>a</think>b<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>b"


@pytest.mark.parametrize(
    "text", ["12 + 345 = 357, so 8:05.", "  two  spaces\n\ttab", "naïve Füße 東京 🙂", "a<b & c>d"]
)
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_one_token_each(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode("7 70 x707", add_special_tokens=False)
    seven = tokenizer.encode("7", add_special_tokens=False)[0]
    assert ids.count(seven) == 4


def test_the_chat_template_opens_the_think_block(tokenizer: PreTrainedTokenizerFast) -> None:
    user = {"role": "user", "content": "What is 12 + 30?"}
    done = {"role": "assistant", "content": "42", "reasoning_content": "Add."}
    asked = "<|im_user|>user<|im_middle|>What is 12 + 30?<|im_end|>"
    opened = "<|im_assistant|>assistant<|im_middle|><think>"

    def render(*messages: dict[str, str], **options: bool) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))

    assert render(user, add_generation_prompt=True) == asked + opened
    assert render(user, done) == f"{asked}{opened}Add.</think>42<|im_end|>"
    assert render(user, add_generation_prompt=True, thinking=False) == f"{asked}{opened}</think>"
    assert render({"role": "system", "content": "Be brief."}, user).startswith(
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
    )


def test_training_sees_the_ids_that_a_server_would_send(tokenizer: PreTrainedTokenizerFast) -> None:
    tasks = generate(28, seed=2)
    raw = Tokenizer.from_file(str(VERIFIER / "tokenizer.json"))
    for task, trace in zip(tasks, encode(raw, tasks), strict=True):
        message = [{"role": "user", "content": task.prompt}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert trace.ids[: trace.prompt] == ids
        assert tokenizer.decode(trace.ids) == prompt_text(task.prompt) + output_text(task)


def test_traces_have_the_stated_lengths(tokenizer: PreTrainedTokenizerFast) -> None:
    raw = Tokenizer.from_file(str(VERIFIER / "tokenizer.json"))
    traces = encode(raw, generate(1400, seed=12))
    outputs = [len(t.ids) - t.prompt for t in traces]
    assert min(t.prompt for t in traces) >= 15
    assert max(t.prompt for t in traces) <= 80
    assert min(outputs) >= 25
    assert max(outputs) <= 140
    assert 55 <= sum(outputs) / len(outputs) <= 90
