"""Three splits by prompt key: train, validation, held-out.

A prompt's place is a hash of its content and the split's seed, compared with a threshold: it does not
depend on the other prompts, on order or on ids, so a prompt that was held out stays so when data is added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from slipstream.traces.prompts import Prompt

TRAIN, VALIDATION, HELD_OUT = "train", "validation", "held_out"
SPLITS = (TRAIN, VALIDATION, HELD_OUT)


def position(prompt: Prompt, seed: int) -> float:
    """A number in [0, 1) that only the prompt's content and the seed decide."""
    hashed = hashlib.sha256(f"{seed}:{prompt.content_key}".encode()).digest()
    return int.from_bytes(hashed[:8], "big") / 2**64


def _fill(name: str, place: dict[str, str], at: dict[str, float]) -> None:
    """Moves one prompt of the largest split into the empty split `name`: the one that stands nearest to it."""
    sizes = {other: list(place.values()).count(other) for other in SPLITS}
    largest = max(SPLITS, key=lambda other: sizes[other])
    if sizes[largest] > 1:
        nearest = max if name == TRAIN else min
        place[nearest((key for key in place if place[key] == largest), key=lambda key: at[key])] = name


def split(prompts: Sequence[Prompt], held_out_ratio: float, val_ratio: float, seed: int) -> dict[str, list[Prompt]]:
    """`prompts` by split, each in the order given.

    Held-out takes positions below `held_out_ratio`, validation the next `val_ratio` of what is left.  A
    split with a ratio above 0 that would stay empty (few prompts) takes the prompt nearest to it.
    """
    at = {prompt.key: position(prompt, seed) for prompt in prompts}
    edges = {HELD_OUT: held_out_ratio, VALIDATION: held_out_ratio + (1 - held_out_ratio) * val_ratio}
    place: dict[str, str] = {}
    for key, value in at.items():
        if value < edges[HELD_OUT]:
            place[key] = HELD_OUT
        else:
            place[key] = VALIDATION if value < edges[VALIDATION] else TRAIN
    for name, ratio in ((TRAIN, 1.0), (HELD_OUT, held_out_ratio), (VALIDATION, val_ratio)):
        if ratio > 0 and name not in place.values():
            _fill(name, place, at)
    return {name: [prompt for prompt in prompts if place[prompt.key] == name] for name in SPLITS}
