"""Makes compressed.safetensors: weights that the compressed_tensors package packed, and what it unpacks them to.

Run once in the serve environment: .venv-serve/bin/python tests/unit/verifier_ends/make_compressed.py
The file's metadata names the package's version and each case's scheme.
"""

from __future__ import annotations

import json
from pathlib import Path

import compressed_tensors
import torch
from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

ROWS, COLUMNS = 22, 64  # rows no multiple of what a packed zero point holds
CASES = {
    "int4-group": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
    "int4-asymmetric": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    "int4-ordered": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": True, "actorder": "group"},
    "int8-channel": {"num_bits": 8, "strategy": "channel", "symmetric": True},
    "int8-channel-asymmetric": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "int8-group": {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": True},
    "plain-int8": {"num_bits": 8, "strategy": "channel", "symmetric": True},
    "plain-fp8": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
}


def main() -> None:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, values in CASES.items():
        args = QuantizationArgs(**values)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        groups = COLUMNS // values["group_size"] if values["strategy"] == "group" else 1
        state = {"weight": torch.randn(ROWS, COLUMNS), "weight_scale": torch.rand(ROWS, groups) * 0.2 + 0.1}
        if not values["symmetric"]:
            half = 1 << (values["num_bits"] - 1)
            state["weight_zero_point"] = torch.randint(-half, half, (ROWS, groups), dtype=torch.int8)
        if values.get("actorder"):
            state["weight_g_idx"] = (torch.randperm(COLUMNS) // values["group_size"]).to(torch.int32)
        form = NaiveQuantizationCompressor if name.startswith("plain") else PackedQuantizationCompressor
        packed = form.compress(state, scheme)
        tensors |= {f"{name}/{part}": tensor.contiguous() for part, tensor in packed.items()}
        tensors[f"{name}/expected"] = form.decompress(packed, scheme)["weight"].contiguous()
    metadata = {"compressed_tensors": compressed_tensors.__version__, "cases": json.dumps(CASES)}
    save_file(tensors, Path(__file__).with_name("compressed.safetensors"), metadata=metadata)


if __name__ == "__main__":
    main()
