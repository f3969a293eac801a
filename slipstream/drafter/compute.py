"""How training computes on its device: which forward pass, which optimizer kernels."""

from __future__ import annotations

import logging
from typing import Any

import torch
from speculators.train.optimizers import build_optimizers

from slipstream.config import DrafterConfig
from slipstream.drafter import ttt
from slipstream.errors import InputError

FP8_CAPABILITY = (8, 9)  # Ada, Hopper and newer multiply in float8


def prepare(model: Any, config: DrafterConfig) -> None:
    """Gives a model that will train on a GPU the fast forward pass where it can have it.

    Not under FSDP, whose layers gather their own weights, and not in float32, which torch's flash kernel does not know.
    Raises InputError for `fp8_linears` on a drafter or GPU that cannot have them, or without torchao.
    """
    if not config.devices:
        return
    why = "drafter.distributed is fsdp" if config.distributed == "fsdp" else ttt.unsupported(model)
    if why is None and config.compute_dtype == "float32":
        why = "drafter.compute_dtype is float32"
    if why is not None:
        if config.fp8_linears:
            raise InputError(f"drafter.fp8_linears: not possible for this drafter, {why}; set it to false")
        logging.getLogger("speculators").info("Training with speculators' own forward pass: %s", why)
        return
    if config.fp8_linears and (found := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        needed, here = (".".join(map(str, capability)) for capability in (FP8_CAPABILITY, found))
        raise InputError(f"drafter.fp8_linears: needs compute capability {needed}, this GPU has {here}")
    ttt.install(model, config.fp8_linears)


def optimizers(model: Any, config: Any) -> list[torch.optim.Optimizer]:
    """speculators' optimizers for a `TrainerConfig`, AdamW's update in one kernel on a GPU.

    At K2.5 shape the default takes 26 of a step's 330 ms on an H200 (8,192 tokens), the fused one 8.
    """
    made: list[torch.optim.Optimizer] = build_optimizers(model, config)
    for optimizer in made:
        if isinstance(optimizer, torch.optim.AdamW) and next(model.parameters()).is_cuda:
            for group in optimizer.param_groups:
                group["foreach"], group["fused"] = False, True
    return made
