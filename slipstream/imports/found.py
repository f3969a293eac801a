"""What an existing store is made of, whichever form it has; `v1` and `current` read the two forms.

Nothing here or there writes into the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.features.sample import SCALES, BadSample

if TYPE_CHECKING:
    import torch

VLLM, OUTPUT = "vllm", "output"
CONVENTIONS = (VLLM, OUTPUT)
"""What id k names: the residual stream BEFORE layer k (vLLM's), or the OUTPUT of layer k (speculators' v1)."""


@dataclass(frozen=True)
class Stated:
    """What the store says about itself; None where it says nothing.  `where` is the file that says it."""

    where: str = ""
    layer_ids: list[int] | None = None
    convention: str | None = None
    final_state: str | None = None
    hidden_size: int | None = None
    verifier: str | None = None  # name or path
    identity: str | None = None  # digest (`verifier.identity`), in stores of ours


@dataclass(frozen=True)
class Sample:
    """One sample without its states: which file, its tokens and mask, and what the states look like.

    `dtype` is a torch name.  `name` is the file's in the store; `number` orders the samples.
    """

    name: str
    number: int
    token_ids: np.ndarray  # int64 [tokens]
    loss_mask: np.ndarray  # int8 [tokens], unshifted
    layers: int
    hidden: int
    dtype: str


@dataclass(frozen=True)
class Bad:
    """A sample that cannot be used, and why."""

    name: str
    number: int
    reason: str


@dataclass(frozen=True)
class States:
    """The states of one sample as they are stored: [tokens, layers, hidden], and the scales of float8 codes."""

    codes: torch.Tensor
    scales: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """float32 [tokens, layers, hidden]."""
        values = self.codes.float()
        return values if self.scales is None else values * self.scales.reshape(-1, 1, 1)

    def select(self, positions: list[int]) -> dict[str, torch.Tensor]:
        """The tensors of a file with only these positions, by name."""
        held = {"hidden_states": self.codes[:, positions].contiguous()}
        return held if self.scales is None else held | {SCALES: self.scales}


@dataclass(frozen=True)
class Store:
    """An open store.

    `survey()` gives its samples in order, without their states (memory for one).  `states(sample)` reads those of
    one; raises BadSample.  `file(sample)` is the path when the file already has the form of the row pool, else None.
    `checksums` are the XXH3-128 of sample files by name, as far as the store lists them.
    """

    folder: Path
    form: str
    count: int
    stated: Stated
    survey: Callable[[], Iterator[Sample | Bad]]
    states: Callable[[Sample], States]
    file: Callable[[Sample], Path | None]
    mappings: list[Path] = field(default_factory=list)
    checksums: Mapping[str, str] = field(default_factory=dict)


def sample_of(name: str, number: int, token_ids: Any, loss_mask: Any, shape: tuple[int, ...], dtype: str) -> Sample:
    """A sample whose parts fit together; raises BadSample with what does not.

    `shape` is [tokens, layers, hidden].
    """
    tokens, mask = np.asarray(token_ids), np.asarray(loss_mask)
    for what, values in (("input_ids", tokens), ("loss_mask", mask)):
        if values.ndim != 1 or values.dtype.kind not in "iub":
            raise BadSample(f"{what} is {values.dtype}{list(values.shape)} instead of whole numbers in one dimension")
    if not len(tokens):
        raise BadSample("no tokens")
    if len(mask) != len(tokens):
        raise BadSample(f"loss_mask has {len(mask)} values for {len(tokens)} tokens")
    if tokens.min() < 0:
        raise BadSample(f"token id {tokens.min()}")
    if not np.isin(mask, (0, 1)).all():
        raise BadSample(f"loss_mask holds {mask[~np.isin(mask, (0, 1))][0]}, only 0 and 1 have a meaning")
    if len(shape) != 3 or shape[0] != len(tokens):
        raise BadSample(f"hidden states of shape {list(shape)} for {len(tokens)} tokens")
    return Sample(name, number, tokens.astype(np.int64), mask.astype(np.int8), shape[1], shape[2], dtype)
