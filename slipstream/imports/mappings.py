"""Draft-vocabulary mappings that lie beside a store: checked, and said how to use them or why not.

`d2t` and `t2d` as .npy or .pt, `token_freq.pt` (a dictionary token id -> count).  The mapping beside a store is not
taken over: the vocabulary is chosen from the rows, or is that of the checkpoint in `drafter.init_from`, which has its
own pair in its weights (`vocabulary.mapping: init_from`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream import vocabulary
from slipstream.errors import Damaged
from slipstream.features.sample import BadSample
from slipstream.imports import v1

PAIR, COUNTS = ("t2d", "d2t"), "token_freq.pt"


def find(folder: Path) -> list[Path]:
    """The mapping files directly in `folder`."""
    names = [f"{name}{suffix}" for name in PAIR for suffix in (".npy", ".pt")] + [COUNTS]
    return [folder / name for name in names if (folder / name).is_file()]


def describe(found: list[Path], vocab_size: int) -> list[str]:
    """One sentence for each pair and for the counts; `vocab_size` is the verifier's."""
    said = []
    by_name = {path.stem: path for path in reversed(found) if path.stem in PAIR}  # .npy before .pt
    if len(by_name) == 2:
        said.append(_pair(by_name["t2d"], by_name["d2t"], vocab_size))
    elif by_name:
        (path,) = by_name.values()
        said.append(f"{path}: not usable without its other half ({' and '.join(PAIR)} belong together)")
    if counts := [path for path in found if path.name == COUNTS]:
        said.append(f"{counts[0]}: not used; the vocabulary stage counts the supervised tokens of the rows themselves")
    return said


def _pair(t2d_path: Path, d2t_path: Path, vocab_size: int) -> str:
    try:
        t2d, d2t = _array(t2d_path), _array(d2t_path)
        vocabulary.check(t2d, d2t)
    except (Damaged, BadSample, ValueError) as error:
        return f"{d2t_path}: not usable: {error}"
    if len(t2d) != vocab_size:
        return f"{t2d_path}: not usable: it is for {len(t2d)} tokens and the verifier has {vocab_size}"
    return (
        f"{d2t_path}: intact, {len(d2t)} of {len(t2d)} tokens, offsets as vLLM reads them; not needed: the vocabulary "
        "stage chooses from the imported rows, or keeps that of the checkpoint in drafter.init_from "
        "(vocabulary.mapping: init_from)"
    )


def _array(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.asarray(np.load(path, allow_pickle=False))
    held: Any = v1.load(path)
    if not isinstance(held, torch.Tensor):
        raise BadSample(f"{path.name} holds a {type(held).__name__} instead of a tensor")
    return held.numpy()
