"""The pocket verifier's tokenizer: byte-level BPE with Kimi-K2.5's control tokens.

`train(texts)` learns the merges, `save(tokenizer, folder)` writes what `AutoTokenizer.from_pretrained(folder)` loads
offline and without `trust_remote_code`: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.

Ids 0 … N-1 are bytes and merges, the control tokens follow in the order of Kimi's own file, and the ids from there to
`VOCAB_SIZE` stand in `config.vocab_size` but mean nothing: like Kimi-K2.5, whose `vocab_size` is larger than
`len(tokenizer)`. Digits are always one token each, and a space before a digit is a token of its own, so that a number
looks the same wherever it stands.

The chat template is Kimi's in form: `<|im_user|>user<|im_middle|>…<|im_end|>`, and the generation prompt opens
`<think>`. A finished assistant turn keeps an empty think block unless the message carries `reasoning_content`.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
"""Rows of the embedding and of the output head."""

CONTROL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<think>",
    "</think>",
    "[UNK]",
    "[PAD]",
)
"""One id each, in id order. `<think>`, `</think>` and the tool-call tokens are not `special`, as in Kimi's file: a
server that skips special tokens must still show them to its parsers."""

PLAIN_TOKENS = frozenset(t for t in CONTROL_TOKENS if "think" in t or "tool_call" in t)

MERGED_IDS = VOCAB_SIZE - len(CONTROL_TOKENS) - 4
"""Bytes and merges together; four ids at the end stay unused."""

CHAT_TEMPLATE = """\
{%- macro role(message) -%}
{%- if message.role == 'user' -%}<|im_user|>{{ message.name or 'user' }}<|im_middle|>
{%- elif message.role == 'assistant' -%}<|im_assistant|>{{ message.name or 'assistant' }}<|im_middle|>
{%- else -%}<|im_system|>{{ message.name or message.role }}<|im_middle|>
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
{{- role(message) -}}
{%- if message.role == 'assistant' -%}
<think>{{ message.reasoning_content or '' }}</think>{{ message.content or '' }}
{%- if message.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{%- if call.function.arguments is string -%}{{ call.function.arguments }}
{%- else -%}{{ call.function.arguments | tojson }}{%- endif -%}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
{%- elif message.role == 'tool' -%}
## Return of {{ message.tool_call_id }}: {{ message.content }}
{%- elif message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- else -%}<|media_begin|>{{ part.type }}<|media_content|><|media_pad|><|media_end|>{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{%- if thinking is defined and not thinking -%}<think></think>{%- else -%}<think>{%- endif -%}
{%- endif -%}
"""


def train(texts: Iterable[str]) -> Tokenizer:
    """Learns at most `MERGED_IDS` byte and merge ids from `texts`, then adds `CONTROL_TOKENS`. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MERGED_IDS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, special=t not in PLAIN_TOKENS, normalized=False) for t in CONTROL_TOKENS])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token. Raises KeyError when the vocabulary lacks it."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the three tokenizer files into `folder`, which must exist."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    decoder = {
        str(tokenizer.token_to_id(t)): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": t not in PLAIN_TOKENS,
        }
        for t in CONTROL_TOKENS
    }
    config = {
        "added_tokens_decoder": decoder,
        "additional_special_tokens": [t for t in CONTROL_TOKENS if t.startswith("<|im_") or t.startswith("<|media_")],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "[PAD]",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "[UNK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
