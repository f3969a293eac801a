"""Three splits by prompt content: train, validation, held-out.

A prompt's place is a hash of its content and the split's seed, compared with a threshold: it does not
depend on the other prompts, on order or on ids, so a prompt that was held out stays so when data is added.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Iterable

from slipstream.traces.prompts import Prompt

TRAIN, VALIDATION, HELD_OUT = "train", "validation", "held_out"
SPLITS = (TRAIN, VALIDATION, HELD_OUT)


def position(prompt: Prompt, seed: int) -> float:
    """A number in [0, 1) that only the prompt's content and the seed decide."""
    return position_of(prompt.content_key, seed)


def position_of(content: str, seed: int) -> float:
    """The same for content that has this name."""
    hashed = hashlib.sha256(f"{seed}:{content}".encode()).digest()
    return int.from_bytes(hashed[:8], "big") / 2**64


class Splitter:
    """Which split a position falls into.

    Held-out takes positions below `held_out_ratio`, validation the next `val_ratio` of what is left.  A split with
    a ratio above 0 that would stay empty (few prompts) takes the position nearest to it from the largest: therefore
    all `positions` are seen once before the first is placed.  `sizes` counts them by split.
    """

    def __init__(self, positions: Iterable[float], held_out_ratio: float, val_ratio: float) -> None:
        self._held_out = held_out_ratio
        self._validation = held_out_ratio + (1 - held_out_ratio) * val_ratio
        self._moved: dict[float, str] = {}
        self.sizes = dict.fromkeys(SPLITS, 0)
        ends: dict[str, list[float]] = {name: [] for name in SPLITS}
        for at in positions:
            name = self.place(at)
            self.sizes[name] += 1
            insort(ends[name], at)
            del ends[name][2:-2]  # two splits at most are empty, so two at either end are enough
        for name, ratio in ((TRAIN, 1.0), (HELD_OUT, held_out_ratio), (VALIDATION, val_ratio)):
            if ratio > 0 and not self.sizes[name]:
                self._fill(name, ends)

    def place(self, at: float) -> str:
        """The split of a prompt at this position."""
        if at in self._moved:
            return self._moved[at]
        if at < self._held_out:
            return HELD_OUT
        return VALIDATION if at < self._validation else TRAIN

    def _fill(self, name: str, ends: dict[str, list[float]]) -> None:
        largest = max(SPLITS, key=lambda other: self.sizes[other])
        if self.sizes[largest] > 1:
            at = ends[largest].pop(-1 if name == TRAIN else 0)
            ends[name].append(at)
            self._moved[at] = name
            self.sizes[largest] -= 1
            self.sizes[name] += 1
