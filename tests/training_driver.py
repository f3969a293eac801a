"""The drafter's training process as one that can be killed at a chosen place, for the tests of resuming.

Reads lines `{"job": path, "world": ranks, "kill": null | {"step": n, "where": place, "number": 9}, "killed": [0, 1]}`
and forks for each rank, so that imports are paid once; prints the exit statuses as a JSON list (-9 for a kill).  A rank
runs `worker.attempt`, as the real process does, its output in `<job's folder>/driver.log`.  `where` is one of PLACES,
the first of its kind at or after step n (0-based, over all epochs), where the `killed` ranks get signal `number` once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # noqa: F401 - these are imported before the fork, for speed
import torch
import transformers  # noqa: F401
from speculators.models.eagle3 import data  # noqa: F401

from slipstream.drafter import checkpoints, tensor_file, trainer, worker
from slipstream.serving import free_port

PLACES = (
    "before the backward pass",
    "between optimizer and schedule",
    "after the line of metrics",
    "in validation",
    "in the middle of a file",
    "before the rename",
    "after the rename",
)
ROOT = Path(__file__).parents[1]


def _plant(step: int, where: str, number: int) -> None:
    """Replaces the function that is called at this place by one that sends the signal."""
    reached = [0]  # steps done
    sent: list[int] = []

    def send() -> None:
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    def before(owner: Any, name: str, ready: Callable[..., bool]) -> None:
        genuine = getattr(owner, name)

        def planted(*arguments: Any, **keywords: Any) -> Any:
            if ready(*arguments):
                send()
            return genuine(*arguments, **keywords)

        setattr(owner, name, planted)

    def now(*arguments: Any) -> bool:
        return reached[0] >= step

    def note(self: Any, *arguments: Any) -> bool:
        reached[0] = self.global_step
        return False

    ours = trainer.EpochTrainer
    before(ours, "train_step", note)
    if where == "before the backward pass":
        before(ours, "_optimizers_zero_grad", now)
    elif where == "between optimizer and schedule":
        before(ours, "_schedulers_step", now)
    elif where == "after the line of metrics":
        before(ours, "_checkpoint_due", now)
    elif where == "in validation":
        before(ours, "val_epoch", now)
    elif where == "before the rename":
        before(checkpoints, "publish", now)
    elif where == "after the rename":
        before(checkpoints, "settle", now)
    else:
        genuine = tensor_file.write

        def cut(path: Path | None, tensors: Any) -> Any:
            record = genuine(path, tensors)
            if reached[0] >= step and path is not None and path.name == "optimizer.state":
                os.truncate(path, path.stat().st_size // 2)
                send()
            return record

        tensor_file.write = cut


def _rank(order: dict[str, Any], rank: int, port: int) -> int:
    path = Path(order["job"])
    output = os.open(path.parent / "driver.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if order["world"] > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["world"], "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    if order["kill"] and rank in order["killed"]:
        _plant(**order["kill"])
    return worker.attempt(path)


def main() -> None:
    """Serves orders until an empty line."""
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # these tests kill processes, not machines
    print("ready", flush=True)
    while line := sys.stdin.readline().strip():
        order = json.loads(line)
        port, children = free_port(), []
        for rank in range(order["world"]):
            if (child := os.fork()) == 0:
                status = 1
                try:
                    status = _rank(order, rank, port)
                finally:
                    os._exit(status)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
