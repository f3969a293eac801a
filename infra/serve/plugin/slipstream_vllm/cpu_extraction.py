"""Hidden-state extraction on a CPU.

The stock connector copies through a CUDA stream into pinned memory.  On a CPU the request returns 200 with
a path, then the worker dies and only an empty lock file remains.  Here the rows are copied out of the cache
before its blocks are freed, and written by the connector's own thread pool.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from pathlib import Path
from typing import Any


class Done:
    """Stands for a CUDA event: the copy is complete when the call returns."""

    def query(self) -> bool:
        """Whether the copy is complete."""
        return True

    def synchronize(self) -> None:
        """Waits for the copy."""


def submit_write(self: Any, pending: Any) -> None:
    """`ExampleHiddenStatesConnector._submit_async_write` for a cache in main memory."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import extract_from_kv_cache

    if not self._is_tp_rank_zero:
        return
    blocks = torch.tensor(pending.block_ids, dtype=torch.long).reshape(-1, 1)
    slots = (torch.arange(self._block_size, dtype=torch.long).reshape(1, -1) + blocks * self._block_size).flatten()
    # Advanced indexing copies, so the blocks may be reused as soon as this returns.
    states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).contiguous()
    tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}

    Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
    lock_fd = self._lock_fds.pop(pending.req_id, None)
    if lock_fd is None and self.use_lock:
        lock_fd = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
    done = Done()
    future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock_fd)
    self._req_copy_events[pending.req_id] = done
    self._req_futures[pending.req_id] = future
    future.add_done_callback(partial(self._on_write_done, pending.req_id))


def apply() -> None:
    """Replaces the connector's copy."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
    )

    ExampleHiddenStatesConnector._submit_async_write = submit_write
