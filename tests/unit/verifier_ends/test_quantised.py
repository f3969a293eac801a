"""Quantised heads and embeddings: the values that compressed_tensors unpacks, and DeepSeek's blocks by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from slipstream.verifier_ends import Unreadable, matrix, read_embedding, read_head
from tests.unit.verifier_ends.layouts import TEXT, ramp, write

FIXTURE = Path(__file__).with_name("compressed.safetensors")  # made by make_compressed.py
with safe_open(FIXTURE, framework="pt") as _file:
    CASES: dict[str, dict[str, Any]] = json.loads(_file.metadata()["cases"])
HELD = load_file(FIXTURE)


def compressed(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """A case's tensors by part, what the package unpacks them to, and its configuration."""
    parts = {key.split("/")[1]: tensor for key, tensor in HELD.items() if key.startswith(f"{name}/")}
    method = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": CASES[name]}}}
    return {part: tensor for part, tensor in parts.items() if part != "expected"}, parts["expected"], method


def folder(
    path: Path, parts: dict[str, torch.Tensor], rows: int, width: int, quantization: Any, where: str = "lm_head"
) -> Path:
    """A verifier whose module `where` has these tensors."""
    plain = {"model.embed_tokens": ramp(1, rows, width), "lm_head": ramp(2, rows, width)}
    tensors = {f"{module}.weight": weight for module, weight in plain.items() if module != where}
    tensors |= {"model.norm.weight": torch.ones(width)} | {f"{where}.{part}": tensor for part, tensor in parts.items()}
    config = TEXT | {"hidden_size": width, "vocab_size": rows}
    return write(
        path, config | ({"quantization_config": quantization} if quantization else {}), tensors, "a.safetensors"
    )


@pytest.mark.parametrize("where", ["lm_head", "model.embed_tokens"])
@pytest.mark.parametrize("name", CASES)
def test_a_compressed_weight_is_what_compressed_tensors_unpacks(
    name: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, expected, method = compressed(name)
    folder(tmp_path, parts, 22, 64, method, where)
    weight = read_head(tmp_path).matrix if where == "lm_head" else read_embedding(tmp_path)
    assert weight.shape == (22, 64)
    assert torch.equal(weight.rows(0, 22), expected)
    assert torch.equal(weight.rows(5, 18), expected[5:18])  # begins inside a packed word of the zero points
    assert torch.equal(weight.take([21, 3]), expected[[21, 3]])
    monkeypatch.setattr(matrix, "BLOCK_ROWS", 9)
    assert torch.equal(torch.cat([rows for _, rows in weight.blocks(20)]), expected[:20])


def test_bits_are_found_without_a_configuration(tmp_path: Path) -> None:
    for name in ("int4-group", "int8-group"):
        parts, expected, _ = compressed(name)
        assert torch.equal(read_head(folder(tmp_path / name, parts, 22, 64, None)).matrix.rows(0, 22), expected)


def test_int4_by_hand(tmp_path: Path) -> None:
    """One word holds the columns -8, -7, 0, 1, 2, -1, 3, 7, lowest bits first, each plus 8; two groups of 4."""
    word = sum((value + 8) << (4 * at) for at, value in enumerate([-8, -7, 0, 1, 2, -1, 3, 7]))
    parts = {
        "weight_packed": torch.tensor([[word - (1 << 32)]], dtype=torch.int32),
        "weight_scale": torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16),
        "weight_shape": torch.tensor([1, 8]),
    }
    head = read_head(folder(tmp_path, parts, 1, 8, None))
    assert head.matrix.rows(0, 1).tolist() == [[-4.0, -3.5, 0.0, 0.5, 4.0, -2.0, 6.0, 14.0]]


FP8 = (ramp(-2, 300, 200) % 7).to(torch.float8_e4m3fn)
BLOCKS = torch.arange(1, 7, dtype=torch.float32).reshape(3, 2) / 8  # of 300 x 200 in 128 x 128


def by_block(high: int, wide: int, scales: torch.Tensor) -> torch.Tensor:
    """FP8 times its blocks' scales, a block at a time."""
    made = FP8.float().clone()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            made[i * high : (i + 1) * high, j * wide : (j + 1) * wide] *= scales[i, j]
    return made


ROWS = torch.arange(1, 301, dtype=torch.float32) / 64
FP8_CASES: dict[str, tuple[str, torch.Tensor, Any, torch.Tensor]] = {
    "one scale": ("weight_scale", torch.tensor(0.25), None, FP8.float() * 0.25),
    "one scale in a list": ("weight_scale", torch.tensor([0.25]), None, FP8.float() * 0.25),
    "one a row": ("weight_scale", ROWS, None, FP8.float() * ROWS[:, None]),
    "one a row, as a column": ("weight_scale", ROWS[:, None], None, FP8.float() * ROWS[:, None]),
    "DeepSeek's blocks": ("weight_scale_inv", BLOCKS, {"quant_method": "fp8", "weight_block_size": [128, 128]},
                          by_block(128, 128, BLOCKS)),
    "blocks that nobody names": ("weight_scale_inv", BLOCKS, None, by_block(128, 128, BLOCKS)),
    "blocks of another size": (
        "weight_scale", BLOCKS, {"config_groups": {"0": {"weights": {"block_structure": [101, 100]}}}},
        by_block(101, 100, BLOCKS),
    ),
    "bfloat16 scales": ("weight_scale", BLOCKS.bfloat16(), None, by_block(128, 128, BLOCKS)),
}  # fmt: skip


@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_is_multiplied_by_its_scales(name: str, tmp_path: Path) -> None:
    part, scales, method, expected = FP8_CASES[name]
    head = read_head(folder(tmp_path, {"weight": FP8, part: scales}, 300, 200, method))
    assert torch.equal(head.matrix.rows(0, 300), expected)
    assert torch.equal(head.matrix.rows(100, 280), expected[100:280])  # across two blocks' borders


def test_a_quantised_verifier_with_a_plain_head_is_plain(tmp_path: Path) -> None:
    """DeepSeek-V3, Kimi-K2.5 and gpt-oss leave both ends in bfloat16."""
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    head = read_head(folder(tmp_path, {"weight": ramp(2, 8, 8).bfloat16()}, 8, 8, method))
    assert torch.equal(head.matrix.rows(0, 8), ramp(2, 8, 8).bfloat16().float())


WORDS, BYTES = torch.zeros(8, 2, dtype=torch.int32), torch.zeros(8, 8, dtype=torch.uint8)
ONES = torch.ones(8, 1)
FOREIGN: dict[str, tuple[dict[str, torch.Tensor], Any, str]] = {
    "gptq": ({"qweight": WORDS, "qzeros": WORDS, "scales": ONES}, {"quant_method": "gptq"}, "quantised as gptq "),
    "awq": ({"qweight": WORDS, "qzeros": WORDS, "scales": ONES}, {"quant_method": "awq"}, "quantised as awq "),
    "nobody says": ({"qweight": WORDS, "qzeros": WORDS, "scales": ONES}, None, "quantised as gptq or awq "),
    "mxfp4": ({"weight_packed": BYTES, "weight_scale": BYTES}, None, "quantised as nvfp4 or mxfp4 "),
    "mxfp4 blocks": ({"weight_blocks": BYTES, "weight_scales": BYTES}, None, "quantised as mxfp4 "),
    "nvfp4": (
        {"weight_packed": BYTES, "weight_scale": ONES.to(torch.float8_e4m3fn), "weight_global_scale": ONES[0]},
        None, "quantised as nvfp4 ",
    ),
    "nvfp4 of ModelOpt": (
        {"weight": BYTES, "weight_scale": ONES.to(torch.float8_e4m3fn), "weight_scale_2": ONES[0]}, None,
        "quantised as nvfp4 ",
    ),
    "mxfp8": (
        {"weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "weight_scale": torch.zeros(8, 1, dtype=torch.uint8)},
        None, "microscaling",
    ),
    "bitsandbytes 4-bit": (
        {"weight": BYTES.reshape(-1, 1), "weight.absmax": ONES, "weight.quant_map": ONES}, None, "bitsandbytes 4-bit ",
    ),
    "bitsandbytes int8": (
        {"weight": torch.zeros(8, 8, dtype=torch.int8), "SCB": ONES}, None, "bitsandbytes int8 ",
    ),
    "integers without scales": ({"weight": torch.zeros(8, 8, dtype=torch.int8)}, None, "no weight_scale"),
    "bytes": ({"weight": BYTES}, {"quant_method": "hqq"}, "quantised as hqq "),
    "no shape": ({"weight_packed": WORDS, "weight_scale": ONES}, None, "no weight_shape"),
    "packed for another shape": (
        {"weight_packed": WORDS, "weight_scale": ONES, "weight_shape": torch.tensor([8, 24])}, None,
        r"\[8, 2\] int32 holds \[8, 24\] in neither 4 nor 8 bits",
    ),
    "other bits": (
        {"weight_packed": WORDS, "weight_scale": ONES, "weight_shape": torch.tensor([8, 8])},
        {"config_groups": {"0": {"weights": {"num_bits": 3}}}}, "config.json says 3 bits",
    ),
    "another width": (
        {"weight_packed": WORDS, "weight_scale": ONES, "weight_shape": torch.tensor([8, 16])}, None,
        r"is \[8, 16\] and the verifier's hidden_size is 8",
    ),
    "scales for other rows": (
        {"weight_packed": WORDS, "weight_scale": torch.ones(3, 1), "weight_shape": torch.tensor([8, 8])}, None,
        r"weight_scale \[3, 1\] does not fit lm_head\.weight_packed of \[8, 8\]",
    ),
    "zero points for other rows": (
        {"weight_packed": WORDS, "weight_scale": ONES, "weight_shape": torch.tensor([8, 8]),
         "weight_zero_point": torch.zeros(1, 1, dtype=torch.int32)}, None, "weight_zero_point .*does not fit",
    ),
    "a group that is none": (
        {"weight_packed": WORDS[:, :1].contiguous(), "weight_scale": torch.ones(8, 2),
         "weight_shape": torch.tensor([8, 8]), "weight_g_idx": torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])},
        None, "weight_g_idx .*does not fit",
    ),
    "a scale that is no number": (
        {"weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "weight_scale": torch.full((8, 1), torch.inf)}, None,
        "not finite",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_forms_that_are_not_read_are_named(name: str, tmp_path: Path) -> None:
    parts, method, words = FOREIGN[name]
    with pytest.raises(Unreadable, match=words):
        read_head(folder(tmp_path, parts, 8, 8, method)).matrix.rows(0, 8)
