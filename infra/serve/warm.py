"""Fills the serve environment's vLLM cache once, so that no server start pays for it.

    .venv-serve/bin/python infra/serve/warm.py

vLLM inspects each model class in a process of its own (13 s on one core) and keeps the answer under
VLLM_CACHE_ROOT; servers are started with the same folder, see slipstream/serving.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ARCHITECTURES = ("KimiK25ForConditionalGeneration", "ExtractHiddenStatesModel", "Eagle3LlamaForCausalLM")


def main() -> None:
    os.environ["VLLM_CACHE_ROOT"] = str(Path(sys.prefix) / "cache" / "vllm")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm.model_executor.models.registry import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.models[name].inspect_model_cls()


if __name__ == "__main__":
    main()
