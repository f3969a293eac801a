"""vLLM plugin of Slipstream: loaded by vLLM in every process through `vllm.general_plugins`.

It changes vLLM in five places and nowhere else (checked against vllm 0.32.0):

* `atomic_writes`: a hidden-state file appears under its name only when it is complete (any device).
* `tensor_parallel`: extraction with several GPUs a server (older vllm, 0.26 among them).
* `cpu_extraction`: hidden-state extraction without CUDA streams and pinned memory (CPU).
* `cpu_logprobs`: log-probabilities do not wait for a compiler (CPU).
* `cpu_blocks`: an MLA verifier and a Llama-type drafter can share a block size of 16 (CPU).

`fp8_connector` is no change but a connector, loaded only by the server that names it.
"""

from __future__ import annotations


def register() -> None:
    """Applies the changes; vLLM calls it once in each of its processes."""
    from vllm.platforms import current_platform

    from slipstream_vllm import atomic_writes, cpu_blocks, cpu_extraction, cpu_logprobs, tensor_parallel

    atomic_writes.apply()
    tensor_parallel.apply()
    if current_platform.is_cpu():
        cpu_blocks.apply()
        cpu_extraction.apply()
        cpu_logprobs.apply()
