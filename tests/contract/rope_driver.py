"""vLLM's rotary embedding of exported drafters, in the serve environment: `rope_driver.py OUT.npz POSITIONS FOLDER…`.

Reads each config.json as a server does (get_config) and asks get_rope as vLLM's LlamaAttention does; writes the rows
[cos | sin] of the positions (comma-separated) under the folders' names.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.config import get_config


def main(out: Path, positions: list[int], folders: list[Path]) -> None:
    """One array a folder, float32 [positions, head_dim]."""
    torch.set_num_threads(1)
    found = {}
    with set_current_vllm_config(VllmConfig()):
        for folder in folders:
            config = get_config(str(folder), trust_remote_code=False)
            made = get_rope(
                config.head_dim,
                max_position=config.max_position_embeddings,
                rope_parameters=config.rope_parameters,
                is_neox_style=True,
                dtype=torch.float32,
            )
            found[folder.name] = made.cos_sin_cache[positions].numpy()
    np.savez(out, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(each) for each in sys.argv[2].split(",")], [Path(each) for each in sys.argv[3:]])
