"""Runs in the serve environment: loads exported drafters into vLLM's own class, beside the pocket verifier, on the CPU.

python loading_driver.py VERIFIER FOLDER...  prints one JSON object: what became of each folder.  Every parameter is
filled with NaN (the mapping with -1) before the weights are given, so that one that stays unloaded shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config


def values(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by name."""
    yield from model.named_parameters()


def load(verifier: str, folder: Path) -> dict[str, Any]:
    """What vLLM makes of one folder."""
    speculative = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    engine = EngineArgs(
        model=verifier,
        dtype="float32",
        max_model_len=256,
        language_model_only=True,
        enforce_eager=True,
        speculative_config=speculative,
    )
    config = engine.create_engine_config()
    drafter = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
        model = initialize_model(config, model_config=drafter)
        for _, value in values(model):
            value.data.fill_(float("nan") if value.is_floating_point() else -1)
        model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    unloaded = [
        name
        for name, value in values(model)
        if bool((torch.isnan(value) if value.is_floating_point() else value == -1).any())
    ]
    layer = model.model.layers[0]
    return {
        "class": type(model).__name__,
        "unloaded": unloaded,
        "own_embedding": model.has_own_embed_tokens,
        "own_head": model.has_own_lm_head,
        "aux": list(get_eagle3_aux_layers_from_config(config.speculative_config)),
        "states": model.model.fc.weight.shape[1] // model.model.fc.weight.shape[0],
        "draft_vocab": model.lm_head.org_vocab_size,
        "norm_before_residual": layer._residual_norm == layer._norm_before_residual,
        "norm_before_fc": model.model.norm_before_fc,
        "fc_norm": model.model.fc_norm is not None,
        "norm_output": model.model.norm_output,
        "eps": layer.input_layernorm.variance_epsilon,
        "heads": [layer.self_attn.total_num_heads, layer.self_attn.total_num_kv_heads, layer.self_attn.head_dim],
        "rope": drafter.hf_config.rope_parameters,
        "rope_class": type(layer.self_attn.rotary_emb).__name__,
        "positions": drafter.hf_config.max_position_embeddings,
        "digest": {
            name: hashlib.sha256(value.detach().float().numpy().tobytes()).hexdigest()[:16]
            for name, value in values(model)
        },
    }


def main(verifier: str, folders: list[str]) -> None:
    """Loads each folder; a refusal of vLLM's is its message."""
    found: dict[str, Any] = {}
    for folder in folders:
        try:
            found[folder] = load(verifier, Path(folder))
        except Exception as error:  # whatever the loader says is the result
            found[folder] = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
