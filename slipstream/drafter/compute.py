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
    """Gives a model on a GPU the fast forward pass where it can have it; under FSDP layers gather their own weights.

    Raises InputError for `fp8_linears` where they cannot be.
    """
    why = None if config.devices else "training runs on the CPU"
    why = why or ("drafter.distributed is fsdp" if config.distributed == "fsdp" else ttt.unsupported(model))
    if config.fp8_linears and why:
        raise InputError(f"drafter.fp8_linears: not possible here, {why}; set it to false")
    if why is None and config.fp8_linears and (found := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        needed, here = (".".join(map(str, capability)) for capability in (FP8_CAPABILITY, found))
        raise InputError(f"drafter.fp8_linears: needs compute capability {needed}, this GPU has {here}")
    if why is None and config.compute_dtype != "float32":  # torch's flash kernel knows 16-bit types only
        ttt.install(model, config.fp8_linears)
    elif config.devices:
        logging.getLogger("speculators").info("speculators' forward pass: %s", why or "drafter.compute_dtype")


def fused_optimizers(model: Any, config: Any) -> list[torch.optim.Optimizer]:
    """speculators' optimizers for a `TrainerConfig`, AdamW's update in one kernel on a GPU.

    At K2.5 shape the default takes 26 of a step's 330 ms on an H200 (8,192 tokens), the fused one 8.
    """
    optimizers = build_optimizers(model, config)
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.AdamW) and next(model.parameters()).is_cuda:
            for group in optimizer.param_groups:
                group["foreach"], group["fused"] = False, True
    return optimizers
