"""SIGTERM in a training: noticed between two batches, by all ranks before the same one.

speculators raises out of whatever the process is doing, which may be the middle of an optimizer step; here the step is
finished, so that what is saved is a state that an undisturbed training passes through.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

STATUS = 128 + signal.SIGTERM


class Interrupted(Exception):
    """The training was asked to end."""


class Interruption:
    """Whether this process, or another rank, was asked to end."""

    def __init__(self) -> None:
        self._asked = False
        # CPU tensors: asking must not wait for the accelerator's queue
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def install(self) -> None:
        """From now on SIGTERM and SIGINT are requests."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _frame: object) -> None:
        self._asked = True

    def check(self) -> None:
        """Raises Interrupted, on all ranks or none; every rank must call it as often."""
        if self.anywhere(self._asked):
            raise Interrupted

    def anywhere(self, here: bool) -> bool:
        """Whether `here` holds on any rank."""
        if self._group is None:
            return here
        flag = torch.tensor([int(here)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)


class Watched:
    """A loader that checks for an interruption before each batch."""

    def __init__(self, loader: Any, interruption: Interruption) -> None:
        self._loader, self._interruption = loader, interruption
        self.batch_sampler = loader.batch_sampler

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._interruption.check()
        for batch in self._loader:
            yield batch
            self._interruption.check()


def outlive_first_request() -> None:
    """In a data worker: the first SIGTERM is the training process's affair, while that lives.

    Who ends a training signals all its processes at once; a data worker that obeyed would make the training process
    raise in the middle of a step (torch.utils.data's SIGCHLD handler).
    """
    parent, asked = os.getppid(), False

    def on_request(number: int, _frame: object) -> None:
        nonlocal asked
        if asked or os.getppid() != parent:
            os._exit(128 + number)
        asked = True

    signal.signal(signal.SIGTERM, on_request)
