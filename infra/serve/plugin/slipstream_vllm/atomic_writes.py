"""Hidden-state files under a temporary name until they are complete.

The stock connector lets safetensors write to the final name: a server that dies meanwhile leaves half a
file there.  Readers are told of the path before it exists and wait on the lock file beside it; that stays.
"""

from __future__ import annotations

import os
from typing import Any

from safetensors.torch import save_file


def write(tensors: dict[str, Any], event: Any, filename: str, lock_fd: int | None) -> None:
    """`ExampleHiddenStatesConnector._write_tensors` with an atomic rename."""
    temporary = f"{filename}.tmp"
    try:
        event.synchronize()
        save_file(tensors, temporary)
        os.replace(temporary, filename)
    finally:
        if lock_fd is not None:
            os.close(lock_fd)  # releases LOCK_EX


def apply() -> None:
    """Replaces the connector's writer."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
    )

    ExampleHiddenStatesConnector._write_tensors = staticmethod(write)
