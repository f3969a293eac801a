"""Reference traces as token ids, and batches of them.

A trace is what the server sees: the chat template's generation prompt, then `thinking</think>answer<|im_end|>`. The
template is written out here because the build tokenises hundreds of thousands of prompts; a test compares it with
`apply_chat_template`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context

import torch
from tokenizers import Tokenizer
from torch import Tensor

from slipstream.pocket.curriculum import Task, stream

IGNORED = -100
"""The label of a position that carries no loss."""


@dataclass(frozen=True)
class Trace:
    """`ids`: prompt and output tokens; the first `prompt` of them are the prompt."""

    ids: list[int]
    prompt: int


@dataclass(frozen=True)
class Batch:
    """`ids` and `labels`, both int64 `[rows, length]`, padded on the right; prompt and padding are `IGNORED`."""

    ids: Tensor
    labels: Tensor


def prompt_text(prompt: str) -> str:
    return f"<|im_user|>user<|im_middle|>{prompt}<|im_end|><|im_assistant|>assistant<|im_middle|><think>"


def output_text(task: Task) -> str:
    return f"{task.thinking}</think>{task.answer}<|im_end|>"


def encode(tokenizer: Tokenizer, tasks: list[Task]) -> list[Trace]:
    """Prompt and output are encoded apart, as a server would: no token spans both."""
    prompts = tokenizer.encode_batch([prompt_text(t.prompt) for t in tasks])
    outputs = tokenizer.encode_batch([output_text(t) for t in tasks])
    return [Trace(p.ids + o.ids, len(p.ids)) for p, o in zip(prompts, outputs, strict=True)]


def _draw(job: tuple[int, int]) -> list[Task]:
    seed, count = job
    return list(islice(stream(seed, held_out=False), count))


def training_tasks(count: int, seed: int) -> list[Task]:
    """`count` tasks that are not held out, the same ones on any number of cores; about 10,000 a second and core."""
    jobs = [(seed * 1_000_003 + i, 5_000) for i in range(-(-count // 5_000))]
    with get_context("spawn").Pool(min(8, os.cpu_count() or 1)) as pool:
        return [task for part in pool.imap(_draw, jobs) for task in part][:count]


def batches(traces: list[Trace], rows: int, pad: int, seed: int) -> Iterator[Batch]:
    """Endless batches of `rows` traces of about one length: 32 batches are drawn together and cut by length."""
    rng = torch.Generator().manual_seed(seed)
    window = 32 * rows
    while True:
        order = torch.randperm(len(traces), generator=rng).tolist()
        for start in range(0, len(order) - window + 1, window):
            picked = sorted((traces[i] for i in order[start : start + window]), key=lambda t: len(t.ids))
            for b in torch.randperm(32, generator=rng).tolist():
                yield pad_right(picked[b * rows : (b + 1) * rows], pad)


def pad_right(traces: list[Trace], pad: int) -> Batch:
    """Lengths are rounded up to a multiple of 8, so that few shapes occur."""
    length = -(-max(len(t.ids) for t in traces) // 8) * 8
    ids = torch.full((len(traces), length), pad)
    labels = torch.full((len(traces), length), IGNORED)
    for row, trace in enumerate(traces):
        end = len(trace.ids)
        ids[row, :end] = torch.tensor(trace.ids)
        labels[row, trace.prompt : end] = ids[row, trace.prompt : end]
    return Batch(ids, labels)
