"""What makes a captured sample unusable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from slipstream.features.sample import FP8, BadSample, Form, check, states_of

TOKENS = [5, 6, 7, 8, 9, 10]


def data(states: torch.Tensor | None = None, tokens: list[int] | None = None, **more: Any) -> bytes:
    """A sample of six tokens, four layers, width eight."""
    tensors = {
        "hidden_states": torch.arange(1.0, 193.0).reshape(6, 4, 8) if states is None else states,
        "token_ids": torch.tensor(TOKENS if tokens is None else tokens),
    }
    return save({name: tensor for name, tensor in tensors.items() if name not in more.get("without", ())})


def good() -> torch.Tensor:
    return torch.arange(1.0, 193.0).reshape(6, 4, 8)


def check_it(content: bytes, dtype: str = "float32") -> tuple[float, float]:
    return check(content, TOKENS, Form(4, 8, dtype))


def with_value(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    states = good().to(dtype)
    states[2, 1, 3] = value
    return states


def test_a_good_sample_tells_its_range() -> None:
    assert check_it(data()) == (1.0, 192.0)


def test_other_types_are_as_good() -> None:
    assert check_it(data(good().bfloat16()), "bfloat16") == (1.0, 192.0)


@pytest.mark.parametrize("tokens", [[5, 6, 7, 8, 9, 11], TOKENS[::-1], TOKENS[:5], [*TOKENS, 1], []])
def test_other_tokens(tokens: list[int]) -> None:
    with pytest.raises(BadSample, match=f"holds {len(tokens)} other tokens than the 6 asked for"):
        check_it(data(tokens=tokens))


@pytest.mark.parametrize("shape", [(4, 4, 8), (6, 3, 8), (6, 4, 7), (6, 32), (6, 4, 8, 1)])
def test_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadSample, match=r"shape .* instead of \[6, 4, 8\]"):
        check_it(data(torch.ones(shape)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_names_token_and_layer(value: float) -> None:
    with pytest.raises(BadSample, match="token 2, layer position 1"):
        check_it(data(with_value(value)))


def test_a_value_that_float16_cannot_hold_is_infinite() -> None:
    with pytest.raises(BadSample, match="NaN or infinity at token 2, layer position 1"):
        check_it(data(with_value(7e4, torch.float16)), "float16")


def test_rows_of_zeros() -> None:
    states = good()
    states[3, 2] = 0
    with pytest.raises(BadSample, match="only zeros at token 3, layer position 2"):
        check_it(data(states))


def test_single_zeros_are_fine() -> None:
    assert check_it(data(with_value(0.0))) == (0.0, 192.0)


def test_another_type() -> None:
    with pytest.raises(BadSample, match="type bfloat16 instead of float32"):
        check_it(data(good().bfloat16()))


@pytest.mark.parametrize("keep", [0, 1, 0.5, -1], ids=["empty", "one byte", "half", "minus a byte"])
def test_a_truncated_file(keep: float) -> None:
    whole = data()
    with pytest.raises(BadSample, match="not a hidden-state file"):
        check_it(whole[: int(len(whole) * keep) if keep == 0.5 else int(keep)])


@pytest.mark.parametrize("without", ["hidden_states", "token_ids"])
def test_a_missing_tensor(without: str) -> None:
    with pytest.raises(BadSample, match=without):
        check_it(data(without=(without,)))


def test_a_pickle_is_not_loaded() -> None:
    with pytest.raises(BadSample, match="not a hidden-state file"):
        check_it(np.array([1], dtype=object).dumps())


def test_the_range_of_any_type_is_torchs() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed, shift in ((0, 0.0), (1, 30.0), (2, -30.0)):  # both signs, only positive, only negative values
            torch.manual_seed(seed)
            states = (torch.randn(6, 4, 8) + shift).to(dtype)
            expected = (float(states.min()), float(states.max()))
            assert check_it(data(states), str(dtype).removeprefix("torch.")) == expected


def float8(states: torch.Tensor) -> bytes:
    """What hs-connectors' own quantiser makes of `states`."""
    from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8

    codes, scales = quantize_tensor_to_fp8(states)
    return save({"hidden_states": codes, SCALES_KEY: scales, "token_ids": torch.tensor(TOKENS)})


def test_float8_states_mean_what_hs_connectors_reads() -> None:
    from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8

    torch.manual_seed(0)
    states = torch.randn(6, 4, 8) * torch.logspace(-2, 2, 6).reshape(6, 1, 1)
    expected = dequantize_fp8_tensor(*quantize_tensor_to_fp8(states), dtype=torch.float32)
    content, form = float8(states), Form(4, 8, FP8)
    assert torch.equal(states_of(content, form), expected)
    assert check(content, TOKENS, form) == pytest.approx((float(expected.min()), float(expected.max())))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0])
def test_a_float8_scale_that_is_no_factor(scale: float) -> None:
    tensors = {"hidden_states": good().to(torch.float8_e4m3fn), "token_ids": torch.tensor(TOKENS)}
    content = save(tensors | {"hidden_states_scales": torch.full((6, 1, 1), scale)})
    with pytest.raises(BadSample, match="as the scale of token 0"):
        check(content, TOKENS, Form(4, 8, FP8))


def test_float8_without_scales_or_with_nan() -> None:
    tensors = {"hidden_states": good().to(torch.float8_e4m3fn), "token_ids": torch.tensor(TOKENS)}
    with pytest.raises(BadSample, match="no hidden_states_scales"):
        check(save(tensors), TOKENS, Form(4, 8, FP8))
    tensors["hidden_states"][2, 1, 3] = float("nan")
    with pytest.raises(BadSample, match="NaN or infinity at token 2, layer position 1"):
        check(save(tensors | {"hidden_states_scales": torch.ones(6, 1, 1)}), TOKENS, Form(4, 8, FP8))
