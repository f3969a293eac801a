"""The processes of one training: speculators' topology on accelerators, and on a CPU too (gloo).

speculators asks for an accelerator wherever it trains (device 0, synchronize, the process group's device): `use_cpu`
answers for a process that has none.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from speculators.train import checkpointer, distributed, trainer


def use_cpu() -> None:
    """Lets speculators' training run in this process without an accelerator."""
    trainer.get_local_rank = lambda: "cpu"  # type: ignore[assignment,return-value]
    checkpointer.get_current_device = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None


def begin(device: str) -> None:
    """Joins the other ranks when started by torchrun; `device` is cuda or cpu."""
    if device != "cpu" or "LOCAL_RANK" not in os.environ:
        distributed.maybe_setup_distributed()
        return
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    distributed._local_rank, distributed._is_distributed = int(os.environ["LOCAL_RANK"]), True
    distributed._rank, distributed._world_size = rank, world
    distributed._init_sp_process_groups(rank, world, 1)
