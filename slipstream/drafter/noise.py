"""Uniform noise on training's auxiliary hidden states, so that a drafter does not lean on exact values.

`drafter.noise` is the half width a: every auxiliary value gets a draw from [-a, a), mean 0, variance a²/3.  That is
the `AddUniformNoise` of speculators 0.3 (`tensor + 2 * (rand - 0.5) * std`, train/noise_transforms.py, `--noise-std`
0.05 by default; later versions dropped it), so its number means the same here.  EAGLE's own data set adds
`(rand - 0.5) * std * 512 / tokens` with std 0.2, half as wide at 512 tokens and narrower the longer the row: not taken,
since a packed row's length says nothing about its states.

A draw is a function of (seed, epoch, row) alone: a resumed training, other data workers and another packing see the
same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

TOKENS_AT_ONCE = 16  # while they are in the core's cache
DRAWS_A_WORD = 4  # of 16 bits in one of 64
STEPS = 1 << 15  # from 0 to either end


@dataclass(frozen=True)
class Noise:
    """Noise of half width `width`; noisy states have type `dtype`, which the batch would have cast them to anyway."""

    width: float
    seed: int
    dtype: torch.dtype

    def add(self, states: torch.Tensor, epoch: int, row: int) -> torch.Tensor:
        """`states` [tokens, values] of a store's row with the noise of that epoch, in memory of its own.

        A draw is one of 65,536 equally spaced ones, from two random bytes: 185 ms of CPU for 2,048 tokens of 3 x 7168,
        against 257 with float32 draws.  The sum is taken in float32.  A longer row begins with a shorter one's draws.
        """
        generator = np.random.SFC64(np.random.SeedSequence((self.seed, epoch, row)))
        noisy = torch.empty(states.shape, dtype=self.dtype)
        for start in range(0, len(states), TOKENS_AT_ONCE):
            part = states[start : start + TOKENS_AT_ONCE].float()
            words = generator.random_raw(-(-part.numel() // DRAWS_A_WORD))
            steps = torch.from_numpy(words.view(np.int16)[: part.numel()]).view(part.shape)
            noisy[start : start + TOKENS_AT_ONCE] = torch.add(part, steps.float().add_(0.5), alpha=self.width / STEPS)
        return noisy


class WithEpoch(Sampler[list[tuple[int, int]]]):
    """The batches of `sampler` with each index as (epoch, index); the epoch is that of speculators' sampler, `source`.

    Data workers outlive an epoch, each with its own copy of the data set, and fetch ahead: the epoch reaches them with
    every index, or not at all.
    """

    def __init__(self, sampler: Any, source: Any) -> None:
        self._sampler, self._source = sampler, source

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order and the noise of the next pass."""
        self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = int(self._source.epoch)
        for batch in self._sampler:
            yield [(epoch, int(index)) for index in batch]
