"""What a training continues from: trained tensors and optimizer state, whatever the number of ranks, bit for bit.

Optimizer state is `optimizer.state`, a safetensors file whose name keeps it from whoever loads every `*.safetensors` of
a folder as weights (vLLM does).  Its tensors are named `<optimizer>.<parameter>.<state>` (`0.fc.weight.exp_avg`,
`0.fc.weight.step`) and have the type they had; learning rates are not in it, because a schedule is a function of the
step (`schedule`).  Sharded parameters (FSDP) are gathered one at a time and cut again on reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from slipstream.artifact import FileRecord
from slipstream.drafter import tensor_file
from slipstream.drafter.checkpoints import MODEL, OPTIMIZER, TRAINED
from slipstream.errors import Damaged


def raw(model: Any) -> Any:
    """The model inside DDP's wrapper, if there is one."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def trained(model: Any) -> dict[str, torch.Tensor]:
    """The tensors that training changes, by name."""
    return {name: value for name, value in raw(model).named_parameters() if value.requires_grad}


def saved(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of speculators' form, by name: the model's without those of the verifier that only training needs."""
    inner = raw(model)
    return {
        name: value for name, value in inner.state_dict().items() if name not in (inner._keys_to_ignore_on_save or [])
    }


def write_config(model: Any, folder: Path) -> None:
    """`config.json` as transformers' `save_pretrained` writes it."""
    inner = raw(model)
    inner.config.dtype = "float32"
    inner.config.architectures = [type(inner).__name__.removeprefix("FSDP")]
    inner.config.save_pretrained(folder)


def _optimizer_state(model: Any, optimizers: Sequence[Any]) -> Iterator[tuple[str, Any, str, torch.Tensor]]:
    """(key in the file, parameter, state's name, value) of all optimizers, in the model's order."""
    named = trained(model)
    for number, optimizer in enumerate(optimizers):
        for name, parameter in named.items():
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                yield f"{number}.{name}.{key}", parameter, key, value


def write(folder: Path | None, model: Any, optimizers: Sequence[Any], whole: bool) -> dict[str, FileRecord]:
    """Writes weights (all of speculators' form if `whole`, else those trained) and optimizer state.

    Every rank calls it; the one that writes gives the folder and gets the records of the files.
    """
    weights = saved(model) if whole else trained(model)
    moments = {key: value for key, _, _, value in _optimizer_state(model, optimizers)}
    files = {}
    for name, tensors in ((MODEL if whole else TRAINED, weights), (OPTIMIZER, moments)):
        if tensors and (record := tensor_file.write(folder / name if folder else None, tensors)) is not None:
            files[name] = record
    if folder is not None and whole:
        write_config(model, folder)
    return files


def load_weights(model: Any, folder: Path) -> None:
    """Copies a checkpoint's tensors into a model that is not wrapped yet; raises Damaged when a trained one lacks."""
    path = folder / MODEL if (folder / MODEL).exists() else folder / TRAINED
    own = saved(model)
    with safe_open(path, framework="pt") as file, torch.no_grad():
        names = set(file.keys())
        if lacking := sorted(trained(model).keys() - names):
            raise Damaged(f"{path}: lacks {lacking[0]}, which this training changes; delete {folder} and run again")
        for name in sorted(names & own.keys()):
            value = file.get_tensor(name)
            if value.shape != own[name].shape:
                shapes = f"{list(value.shape)} instead of {list(own[name].shape)}"
                raise Damaged(f"{path}: {name} has the shape {shapes}; delete {folder} and run again")
            own[name].copy_(value)


def _cut_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`value` on the parameter's ranks and device."""
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        value = value.to(parameter.device_mesh.device_type)
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


def load_optimizers(model: Any, optimizers: Sequence[Any], folder: Path) -> None:
    """Gives the optimizers the state that a checkpoint holds; their groups and learning rates stay."""
    names = {id(parameter): name for name, parameter in raw(model).named_parameters()}
    with safe_open(folder / OPTIMIZER, framework="pt") as file:
        keys = list(file.keys())
        for number, optimizer in enumerate(optimizers):
            groups = optimizer.state_dict()["param_groups"]
            order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            found: dict[int, Mapping[str, torch.Tensor]] = {}
            for index, parameter in enumerate(order):
                prefix = f"{number}.{names[id(parameter)]}."
                own = [key for key in keys if key.startswith(prefix) and "." not in key[len(prefix) :]]
                if own:
                    found[index] = {key[len(prefix) :]: _cut_like(file.get_tensor(key), parameter) for key in own}
            optimizer.load_state_dict({"state": found, "param_groups": groups})
