"""Guards of a training: steps without a supervised token are skipped, a loss that went wrong ends it in one sentence.

A step on CUDA never waits for a guard: losses and gradient norms stay on the device until `every` of them are there
(and before each checkpoint), then one copy brings all to the host.  So training ends up to `every` steps after the one
that the sentence names, and no checkpoint holds what came between.

All ranks decide alike: they compare the mean of their losses, and skip a step only when none of them has a supervised
token.  What a guard remembers (the last losses) changes no weight, so it is in no checkpoint: after a resume the median
begins anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from slipstream.errors import StageFailed

MEDIAN_OF = 100  # steps
JUDGED_FROM = 20  # steps; before them a median says little
FLOOR = 0.05  # a median below counts as this: 20 times a tiny loss is no explosion
AT_ONCE = 50  # most steps looked at together
NAMED_ROWS = 16
ADVICE = "look at these rows or lower drafter.learning_rate"


def learns(mask: torch.Tensor, on_device: torch.Tensor) -> bool:
    """Whether any rank's batch has a supervised token; `mask` is this rank's loss mask, then its copy on the device.

    Every rank joins; only those without one wait for the answer, which the others know.
    """
    here = bool(mask.any())
    if not dist.is_initialized():
        return here
    anywhere = on_device.any().to(torch.int32).reshape(1)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    return here or bool(anywhere.item())


class Guard:
    """Watches losses and gradient norms; `rows(epoch, step)` names the store's rows of this rank's batch.

    Fails above `factor` times the median of the last losses, and for what is not finite.
    """

    def __init__(
        self, factor: float, every: int, device: torch.device | str | int, rows: Callable[[int, int], Sequence[int]]
    ) -> None:
        self._factor, self._rows = factor, rows
        self._seen = torch.zeros(2, every, dtype=torch.float32, device=device)
        self._steps: list[tuple[int, int, int]] = []  # of what was seen since the last check: epoch, step in it, of all
        self._losses: deque[float] = deque(maxlen=MEDIAN_OF)

    def see(self, epoch: int, step: int, global_step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """A step's loss and gradient norm (scalars on the device); raises StageFailed as `check` does.

        `step` is counted within the epoch, `global_step` over all; both from 0.
        """
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP
        at = len(self._steps)
        self._seen[0, at] = loss.detach()
        self._seen[1, at] = whole.detach()
        self._steps.append((epoch, step, global_step))
        if len(self._steps) == self._seen.shape[1]:
            self.check()

    def check(self) -> None:
        """Raises StageFailed, on all ranks together, for the first step since the last check that went wrong."""
        if not self._steps:
            return
        seen, ranks = self._seen[:, : len(self._steps)].clone(), 1
        if dist.is_initialized():
            ranks = dist.get_world_size()
            dist.all_reduce(seen)
        losses, norms = (seen / ranks).tolist()
        steps, self._steps = self._steps, []
        for (epoch, step, global_step), loss, norm in zip(steps, losses, norms, strict=True):
            if wrong := self._judge(loss, norm):
                rows = self._named(epoch, step)
                raise StageFailed(f"epoch {epoch}, step {global_step}, rows {rows} of the features: {wrong}; {ADVICE}")
            self._losses.append(loss)

    def _judge(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the norm of the gradient is {norm}"
        if len(self._losses) >= JUDGED_FROM:
            usual = median(self._losses)
            if loss > self._factor * max(usual, FLOOR):
                return (
                    f"the loss is {loss:.4g} after a median of {usual:.4g} over the last {len(self._losses)} steps, "
                    f"more than drafter.max_loss_factor ({self._factor:g}) times that"
                )
        return None

    def _named(self, epoch: int, step: int) -> str:
        """The rows of all ranks' batches of this step."""
        mine = list(map(int, self._rows(epoch, step)))
        every: list[list[int]] = [mine]
        if dist.is_initialized():
            every = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, mine)
        rows = [row for each in every for row in each]
        more = f" and {len(rows) - NAMED_ROWS} more" if len(rows) > NAMED_ROWS else ""
        return f"{', '.join(map(str, rows[:NAMED_ROWS]))}{more}"
