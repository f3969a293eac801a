"""The connector of the fp8 store: hs-connectors' per-token float8_e4m3 form, written atomically.

    --kv-transfer-config '{"kv_connector": "AtomicFP8HiddenStatesConnector",
                           "kv_connector_module_path": "slipstream_vllm.fp8_connector", …}'

Form and arithmetic are hs-connectors' own (its FP8Transfer reads the files): `hidden_states` float8_e4m3fn,
`hidden_states_scales` float32 [tokens, 1, 1], `token_ids`.  It overrides the stock writer, so `atomic_writes.apply`
does not reach it; the copy out of the cache is inherited, also the one of `cpu_extraction`.
"""

from __future__ import annotations

from typing import Any

from hs_connectors.fp8_hidden_states_connector import FP8HiddenStatesConnector

from slipstream_vllm import atomic_writes


class AtomicFP8HiddenStatesConnector(FP8HiddenStatesConnector):
    """hs-connectors' FP8HiddenStatesConnector whose files appear complete or not at all."""

    @staticmethod
    def _write_tensors(tensors: dict[str, Any], event: Any, filename: str, lock_fd: int | None) -> None:
        atomic_writes.through(FP8HiddenStatesConnector._write_tensors, tensors, event, filename, lock_fd)
