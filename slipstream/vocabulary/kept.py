"""The maps of a warm start, for a run that keeps them (`vocabulary.mapping: init_from`) and for moving its head's rows.

They lie in the checkpoint's safetensors, under `t2d` and `d2t` (EAGLE-3 as vLLM and speculators read it) or with a
`model.` before.  Either map says what the other must be, so one is enough; both must agree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from slipstream.config import RunConfig
from slipstream.errors import Damaged, InputError
from slipstream.vocabulary.mapping import check, mappings

MAPS = ("t2d", "d2t")


def read(folder: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """The checked pair `(t2d, d2t)` of a checkpoint folder; None when it has neither.

    Raises InputError: no or unreadable weights, maps that break an invariant, a d2t alone without a vocabulary size
    in config.json.
    """
    found: dict[str, np.ndarray] = {}
    for file in weights(folder):
        try:
            with safe_open(file, framework="numpy") as held:
                for name in held.keys():  # noqa: SIM118 - not a mapping
                    if (plain := name.removeprefix("model.")) in MAPS:
                        found[plain] = held.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: cannot be read as safetensors ({error}); fetch the checkpoint again") from error
    if not found:
        return None
    try:
        return _pair(folder, found)
    except Damaged as error:
        raise InputError(f"{folder}: {error}; fetch the checkpoint again, or start from another") from error


def weights(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files; raises InputError when there are none (pickles are not loaded)."""
    if files := sorted(folder.glob("*.safetensors")):
        return files
    pickled = sorted(path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}"))
    found = f" ({pickled[0]} is a pickle, which can run code: convert it to safetensors)" if pickled else ""
    raise InputError(
        f"{folder}: no .safetensors file to warm-start from{found}; set drafter.init_from to a checkpoint folder"
    )


def _pair(folder: Path, found: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    given_t2d, given_d2t = found.get("t2d"), found.get("d2t")
    d2t = None if given_d2t is None else _whole(given_d2t)
    if given_t2d is not None:
        t2d = given_t2d.astype(np.bool_) if {*np.unique(given_t2d).tolist()} <= {0, 1} else given_t2d
    else:
        assert d2t is not None
        t2d = _t2d(d2t, _vocab_size(folder))
    if d2t is None:
        _, d2t = mappings(np.flatnonzero(t2d), len(t2d))
    check(t2d, d2t)
    return t2d, d2t


def _whole(d2t: np.ndarray) -> np.ndarray:
    return d2t.astype(np.int64) if np.issubdtype(d2t.dtype, np.integer) else d2t


def _t2d(d2t: np.ndarray, target_size: int) -> np.ndarray:
    meant = np.arange(len(d2t)) + d2t
    if len(meant) and (meant.min() < 0 or meant.max() >= target_size or bool((np.diff(meant) <= 0).any())):
        raise Damaged(
            f"d2t makes its {len(d2t)} draft ids tokens {meant.min()} … {meant.max()} of a vocabulary of "
            f"{target_size}, not in ascending order within it: its entries are no OFFSETS (target id - draft id)"
        )
    t2d, _ = mappings(meant, target_size)
    return t2d


def _vocab_size(folder: Path) -> int:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    size = (config.get("transformer_layer_config") or config).get("vocab_size")
    if not isinstance(size, int):
        raise InputError(f"{path}: vocab_size is {size!r}, so nothing says how many tokens its d2t is for")
    return size


def of_warm_start(config: RunConfig, target_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The pair that this run keeps; raises InputError when it is absent or not for this run, with both numbers."""
    folder = Path(str(config.drafter.init_from))
    if (pair := read(folder)) is None:
        raise InputError(
            f"{folder}: the checkpoint has no d2t and t2d, so there is no mapping to keep; set vocabulary.mapping to "
            "traces"
        )
    t2d, d2t = pair
    if len(t2d) != target_size:
        raise InputError(f"{folder}: its mapping is for {len(t2d)} target tokens and the verifier has {target_size}")
    if len(d2t) != config.vocabulary.size:
        raise InputError(
            f"vocabulary.size: {config.vocabulary.size} is not the size of the mapping that is kept: {folder} has "
            f"{len(d2t)} draft tokens; write {len(d2t)}"
        )
    if lost := sorted(token for token in config.vocabulary.must_keep if not t2d[token]):
        raise InputError(
            f"vocabulary.must_keep: tokens {lost} are not in the mapping of {folder}, which is kept unchanged; leave "
            "them out, or set vocabulary.mapping to traces"
        )
    return t2d, d2t
