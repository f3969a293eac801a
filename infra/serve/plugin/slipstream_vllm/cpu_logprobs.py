"""Log-probabilities without a compiler.

vLLM counts a token's rank through `torch.compile`, also with --enforce-eager, to save memory on a GPU.  On a CPU the
first request that asks for log-probabilities then waits for a C++ compiler: 85 s on two busy cores.
"""

from __future__ import annotations

import sys
from typing import Any


def count_greater(x: Any, values: Any) -> Any:
    """`batched_count_greater_than`, uncompiled: how many of each row of x [n, m] reach values [n, 1]."""
    return (x >= values).sum(-1)


def apply() -> None:
    """Replaces the compiled function, also where it was imported already."""
    from vllm.v1.sample.ops import logprobs

    logprobs.batched_count_greater_than = count_greater
    if (sampler := sys.modules.get("vllm.v1.sample.sampler")) is not None:
        sampler.batched_count_greater_than = count_greater
