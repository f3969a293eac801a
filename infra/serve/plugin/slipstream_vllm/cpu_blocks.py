"""A block size that CPU_MLA and CPU_ATTN share.

CPU_MLA's decode kernel takes blocks of 16 only.  CPU_ATTN declares multiples of 32, so a Llama-type
drafter beside an MLA verifier ends in "No common block size for 16", although its `vec16` kernel
(picked by `_get_attn_isa` when the size is no multiple of 32) takes 16.
"""

from __future__ import annotations

from typing import Any


def apply() -> None:
    """Lets CPU_ATTN declare what its kernels can do."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    def supported(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(supported)
