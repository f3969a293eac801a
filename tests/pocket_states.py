"""The pocket verifier's states and log-probabilities by transformers, and a stub that serves them as vLLM would."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stub_server import Capture, StubServer
from tokenizers import Tokenizer

from slipstream.pocket import curriculum, traces
from slipstream.pocket.model import load_text_model

POCKET = Path(__file__).parents[1] / "slipstream" / "pocket" / "verifier"
FINAL = 6


class States:
    """States float32 [tokens, 7, 128] of ids 0 … 6 by transformers' `hidden_states`; the last before the final norm."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._final: list[torch.Tensor] = []
        model.model.norm.register_forward_pre_hook(lambda module, args: self._final.append(args[0].detach()))
        self.of = lru_cache(256)(self._of)

    def _of(self, tokens: tuple[int, ...]) -> tuple[np.ndarray, list[dict[int, float] | None]]:
        self._final.clear()
        with torch.no_grad():
            out = self.model(torch.tensor([tokens]), output_hidden_states=True)
        states = torch.stack([*(state[0] for state in out.hidden_states[:FINAL]), self._final[-1][0]], dim=1)
        rows: list[dict[int, float] | None] = [None]
        for position, row in enumerate(torch.log_softmax(out.logits[0].float(), -1)[:-1], 1):
            top = {*row.topk(5).indices.tolist(), tokens[position]}
            rows.append({token: float(row[token]) for token in top})
        return states.numpy(), rows

    def states(self, tokens: Sequence[int], ids: Sequence[int]) -> np.ndarray:
        """float32 [tokens, len(ids), 128]."""
        return np.ascontiguousarray(self.of(tuple(tokens))[0][:, list(ids)])  # safetensors saves others wrongly

    def logprobs(self, tokens: Sequence[int]) -> list[dict[int, float] | None]:
        """The server's top 5 and the token itself, by position."""
        return self.of(tuple(tokens))[1]

    def normed(self, states: np.ndarray) -> np.ndarray:
        """transformers' final norm."""
        with torch.no_grad():
            made: np.ndarray = self.model.model.norm(torch.from_numpy(states)).numpy()
        return made


@cache
def pocket() -> States:
    """The verifier as it is."""
    torch.set_num_threads(1)
    return States(load_text_model(POCKET))


@cache
def retrained() -> States:
    """The verifier with other layers, as another training run would leave it: every matrix a third off."""
    model = copy.deepcopy(load_text_model(POCKET))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.model.layers.named_parameters():
            if weight.ndim > 1 and "gate.weight" not in name:
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() / 3)
    return States(model)


@cache
def samples(count: int = 60) -> list[list[int]]:
    """Traces of the curriculum, prompt and answer."""
    tokenizer = Tokenizer.from_file(str(POCKET / "tokenizer.json"))
    rng = random.Random(5)
    tasks = [curriculum.sample(kind, rng) for kind in list(curriculum.KINDS) * 5][:count]
    return [trace.ids for trace in traces.encode(tokenizer, tasks)]


def of_equal_length() -> tuple[list[int], list[int]]:
    """Two different traces of one length."""
    by_length: dict[int, list[int]] = {}
    for tokens in samples():
        if (other := by_length.setdefault(len(tokens), tokens)) != tokens:
            return other, tokens
    raise AssertionError("no two of these traces have one length")


Change = Callable[[np.ndarray], np.ndarray]


def serve(
    stub: StubServer, ids: Sequence[int], of: States, change: Change = lambda states: states, **more: Any
) -> None:
    """Lets the stub answer as an extraction server of this verifier with these layer ids."""

    def decide(tokens: list[int], number: int) -> Capture:
        given = {"states": change(of.states(tokens, ids)), "prompt_logprobs": of.logprobs(tokens)}
        return Capture(**given | more)

    stub.on_capture(decide)
