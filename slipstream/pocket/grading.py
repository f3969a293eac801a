"""Greedy exact match of a pocket verifier on tasks, per kind."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import DeepseekV3ForCausalLM

from slipstream.pocket.curriculum import Task
from slipstream.pocket.tokenizer import token_id
from slipstream.pocket.traces import encode

MOST_OUTPUT_TOKENS = 160


@dataclass(frozen=True)
class Grade:
    """Of `tasks` tasks, how many answers and how many whole outputs (reasoning too) equal the reference."""

    tasks: int
    answers: int
    outputs: int


def complete(model: DeepseekV3ForCausalLM, prompts: list[list[int]], eos: int, pad: int) -> list[list[int]]:
    """Greedy outputs, each up to and with `eos`; prompts are padded on the left to one batch."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    # transformers types `generate` for a protocol that its own models do not meet
    generate: Any = getattr(model, "generate")  # noqa: B009
    with torch.inference_mode():
        out = generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=MOST_OUTPUT_TOKENS,
            eos_token_id=eos,
            pad_token_id=pad,
        )
    rows = [row[longest:] for row in out.tolist()]
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def grade(model: DeepseekV3ForCausalLM, tokenizer: Tokenizer, tasks: list[Task], rows: int = 64) -> dict[str, Grade]:
    """Grades by kind. The answer is what follows `</think>`, without the end token."""
    eos, pad, close = (token_id(tokenizer, t) for t in ("<|im_end|>", "[PAD]", "</think>"))
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    pairs = sorted(zip(tasks, encode(tokenizer, tasks), strict=True), key=lambda pair: len(pair[1].ids))
    for start in range(0, len(pairs), rows):
        part = pairs[start : start + rows]
        outputs = complete(model, [trace.ids[: trace.prompt] for _, trace in part], eos, pad)
        for (task, trace), output in zip(part, outputs, strict=True):
            after = output[output.index(close) + 1 :] if close in output else []
            answered = after[-1:] == [eos] and tokenizer.decode(after[:-1]) == task.answer
            for i, hit in enumerate((True, answered, output == trace.ids[trace.prompt :])):
                counts[task.kind][i] += hit
    return {kind: Grade(*three) for kind, three in sorted(counts.items())}


def table(grades: dict[str, Grade]) -> str:
    """One line a kind and one for all: tasks, share of exact answers, share of exact outputs."""
    whole = Grade(*(sum(getattr(g, f) for g in grades.values()) for f in ("tasks", "answers", "outputs")))
    return "\n".join(
        f"{kind:10} {g.tasks:5} answer {g.answers / g.tasks:.3f} full {g.outputs / g.tasks:.3f}"
        for kind, g in [*grades.items(), ("all", whole)]
    )
