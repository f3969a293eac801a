"""Hidden states from servers of several GPUs, with vllm before the connector told who reports (0.26 among them).

Only the first rank writes a request's states, but without `get_finished_count` vLLM waits for every rank to say that
it is done: the request's blocks are never freed, and the server stands still when its cache is full of them.
"""

from __future__ import annotations


def apply() -> None:
    """Has one report finish a request, where the connector does not say so itself."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
    )

    if ExampleHiddenStatesConnector.get_finished_count is KVConnectorBase_V1.get_finished_count:
        ExampleHiddenStatesConnector.get_finished_count = lambda self: 1
