"""One captured sample: the file format, and what makes a sample unusable.

A safetensors file as vLLM's connector writes it and speculators reads it: `hidden_states`
[tokens, layer ids, hidden size] in the served type, `token_ids` int64 [tokens].  The last layer id is the
final state, before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load

from slipstream.artifact import FileRecord


class BadSample(ValueError):
    """Why a captured sample may not be stored."""


@dataclass(frozen=True)
class SampleInfo:
    """What the index keeps of a sample: its file, its length, the range of its values."""

    file: FileRecord
    tokens: int
    minimum: float
    maximum: float


def check(data: bytes, token_ids: Sequence[int], layers: int, hidden: int, dtype: str) -> tuple[float, float]:
    """Smallest and largest value of the sample in `data`.

    Raises BadSample: not safetensors, other tokens than `token_ids`, another shape than
    [tokens, layers, hidden], another type, NaN or infinity (names the layer), rows of zeros.
    """
    try:
        tensors = load(data)
        states, tokens = tensors["hidden_states"], tensors["token_ids"]
    except Exception as error:
        raise BadSample(f"not a hidden-state file ({type(error).__name__}: {error})") from error
    if tokens.tolist() != list(token_ids):
        raise BadSample(f"holds {len(tokens)} other tokens than the {len(token_ids)} asked for")
    if tuple(states.shape) != (len(token_ids), layers, hidden):
        raise BadSample(f"shape {list(states.shape)} instead of {[len(token_ids), layers, hidden]}")
    if states.dtype != getattr(torch, dtype):
        raise BadSample(f"type {str(states.dtype).removeprefix('torch.')} instead of {dtype}")
    finite = torch.isfinite(states).all(dim=2)
    if not finite.all():
        row, layer = (int(i) for i in torch.nonzero(~finite)[0])
        raise BadSample(f"NaN or infinity at token {row}, layer position {layer}")
    if bool((states == 0).all(dim=2).any()):
        row, layer = (int(i) for i in torch.nonzero((states == 0).all(dim=2))[0])
        raise BadSample(f"only zeros at token {row}, layer position {layer}")
    return float(states.min()), float(states.max())
