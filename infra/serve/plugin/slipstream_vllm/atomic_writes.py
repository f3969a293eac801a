"""Hidden-state files under a temporary name until they are complete.

The connectors let safetensors write to the final name, and before safetensors 0.8.0 (vLLM takes older ones) a server
that dies meanwhile leaves half a file there.  Readers are told of the path before it exists and wait on the lock file
beside it; that stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

Writer = Callable[[dict[str, Any], Any, str, int | None], None]


def through(writer: Writer, tensors: dict[str, Any], event: Any, filename: str, lock_fd: int | None) -> None:
    """Has `writer`, a connector's `_write_tensors`, write to a temporary name; renames, then releases the lock."""
    temporary = f"{filename}.tmp"
    try:
        writer(tensors, event, temporary, None)
        os.replace(temporary, filename)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    finally:
        if lock_fd is not None:
            os.close(lock_fd)  # releases LOCK_EX


def _save(tensors: dict[str, Any], event: Any, filename: str, lock_fd: int | None) -> None:
    event.synchronize()
    save_file(tensors, filename)


def write(tensors: dict[str, Any], event: Any, filename: str, lock_fd: int | None) -> None:
    """`ExampleHiddenStatesConnector._write_tensors` with an atomic rename."""
    through(_save, tensors, event, filename, lock_fd)


def apply() -> None:
    """Replaces the stock connector's writer."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
    )

    ExampleHiddenStatesConnector._write_tensors = staticmethod(write)
