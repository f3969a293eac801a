"""speculators' first form of offline data (`data_generation_offline.py`, versions 0.2 and 0.3).

    data_<i>.pt         torch.save of {"input_ids": long [tokens], "loss_mask": long [tokens],
                        "hidden_states": list of [tokens, hidden], one a layer id, the last one the final state}
    data_config.json    {"hidden_states": {"layer_ids"}, "model": {"target_model_path", "hidden_size"}, ...}; written
                        when the last sample was, so a store whose making was cut short has none
    d2t.pt, t2d.pt, token_freq.pt    mappings, when somebody put them there (later ones are .npy)

Its worker captured a state after layer k had run, so its ids name OUTPUTS: with 61 layers 60 was the final state.
No file says so, and patched workers differ: it is measured, or the user says it.  Early versions took that last state
after the final norm, later ones before it; no file says that either.  Files appeared under their final names while they
were written: a killed run left half ones.
https://github.com/vllm-project/speculators (src/speculators/data_generation)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import InputError
from slipstream.features.sample import BadSample
from slipstream.imports.found import Bad, Sample, Stated, States, Store, sample_of

DATA = re.compile(r"data_(\d+)\.pt")
CONFIG = "data_config.json"


def files(folder: Path) -> list[Path]:
    """The samples' files in the order of their numbers."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := DATA.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def open_store(folder: Path, found: list[Path]) -> Store:
    """The store of these files; raises InputError when its data_config.json cannot be read."""
    return Store(
        folder=folder,
        form="speculators' v1 form",
        count=len(found),
        stated=_stated(folder / CONFIG),
        survey=partial(_survey, found),
        states=partial(_states, folder),
        file=lambda sample: None,
    )


def _stated(path: Path) -> Stated:
    if not path.is_file():
        return Stated()
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        layer_ids = [int(layer) for layer in said["hidden_states"]["layer_ids"]]
        model = said.get("model", {})
        hidden, name = model.get("hidden_size"), model.get("target_model_path")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not the data_config.json of a v1 store ({type(error).__name__}: {error})") from error
    return Stated(str(path), layer_ids, hidden_size=hidden, verifier=name)


def load(path: Path) -> Any:
    """What `torch.save` wrote, without running code of its pickle and, where the file allows, without reading tensors.

    Raises BadSample.
    """
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # torch's form before 1.6 cannot be mapped
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise BadSample(
            f"torch.load cannot read it with weights_only ({type(error).__name__}: {reason[:1]})"
        ) from error


def _survey(found: list[Path]) -> Iterator[Sample | Bad]:
    for path in found:
        number = int(path.stem.removeprefix("data_"))
        try:
            yield _sample(path, number)
        except BadSample as error:
            yield Bad(path.name, number, str(error))


def _sample(path: Path, number: int) -> Sample:
    held = _held(path)
    states = held["hidden_states"]
    if isinstance(states, torch.Tensor):
        shape = _stacked(states, len(held["input_ids"])).shape
        dtype = states.dtype
    else:
        shapes, dtypes = {tuple(layer.shape) for layer in states}, {layer.dtype for layer in states}
        if len(shapes) != 1 or len(dtypes) != 1:
            raise BadSample(f"layers of {len(shapes)} shapes and {len(dtypes)} types: {sorted(map(list, shapes))}")
        (one,), (dtype,) = shapes, dtypes
        shape = torch.Size((one[0], len(states), *one[1:]))
    mask = held["loss_mask"]
    mask = mask.numpy() if isinstance(mask, torch.Tensor) else mask
    return sample_of(
        path.name, number, held["input_ids"].numpy(), mask, tuple(shape), str(dtype).removeprefix("torch.")
    )


def _held(path: Path) -> dict[str, Any]:
    held = load(path)
    if not isinstance(held, dict):
        raise BadSample(f"holds a {type(held).__name__} instead of a dictionary")
    if missing := [name for name in ("input_ids", "hidden_states", "loss_mask") if held.get(name) is None]:
        raise BadSample(f"has no {', '.join(missing)}")
    if not isinstance(held["input_ids"], torch.Tensor):
        raise BadSample(f"input_ids is a {type(held['input_ids']).__name__} instead of a tensor")
    states = held["hidden_states"]
    layers = [states] if isinstance(states, torch.Tensor) else states
    if not isinstance(layers, list | tuple) or not layers or not all(isinstance(s, torch.Tensor) for s in layers):
        raise BadSample("hidden_states is neither a tensor nor a list of tensors")
    return held


def _stacked(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """A stacked tensor as [tokens, layers, hidden]; it may stand as [layers, tokens, hidden]."""
    if states.dim() == 3 and states.shape[0] != tokens and states.shape[1] == tokens:
        return states.transpose(0, 1)
    return states


def _states(folder: Path, sample: Sample) -> States:
    held = _held(folder / sample.name)
    states = held["hidden_states"]
    if isinstance(states, torch.Tensor):
        return States(_stacked(states, len(sample.token_ids)))
    return States(torch.stack(list(states), dim=1))
