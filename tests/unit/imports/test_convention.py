"""What ids mean under either convention, for the 61 layers of Kimi-K2.5 and the pocket verifier's six."""

from __future__ import annotations

import pytest

from slipstream.errors import InputError
from slipstream.imports.convention import positions

KIMI = [2, 30, 58, 61]


@pytest.mark.parametrize(("layer_ids", "convention"), [([2, 30, 58, 61], "vllm"), ([1, 29, 57, 60], "output")])
def test_the_same_states_under_two_names(layer_ids: list[int], convention: str) -> None:
    assert positions("store", layer_ids, convention, KIMI) == [0, 1, 2, 3]


def test_more_layers_than_are_wanted() -> None:
    assert positions("store", [0, 2, 16, 30, 58, 61], "vllm", KIMI) == [1, 3, 4, 5]
    assert positions("store", [0, 1, 2, 3, 4, 5], "output", [2, 3, 5, 6]) == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("layer_ids", "convention", "words"),
    [
        # the field's case: 60 as the last of 61 layers
        ([2, 30, 58, 60], "vllm", ["last state is id 60, the input of the last layer", "final state is id 61",
                                   "layer ids [2, 30, 58, 61]", "--convention output"]),
        ([2, 30, 58, 59], "output", ["last state is id 59 (60 in vLLM's ids)", "final state is id 61"]),
        ([2, 30, 58], "vllm", ["last state is id 58, the input of layer 58", "final state is id 61"]),
        ([2, 30, 60], "output", ["holds the layers [3, 31, 61]", "wants [2, 30, 58]", "[2, 30, 58] are not there"]),
        ([2, 30, 58, 62], "vllm", ["layer id 62 is out of range", "0 to 61"]),
        ([2, 30, 58, 61], "output", ["layer id 61 is out of range", "0 to 60"]),
        ([-1, 30, 58, 61], "vllm", ["layer id -1 is out of range"]),
        ([2, 61, 58, 61], "vllm", ["layer id 61 is the final state", "auxiliary ones [2, 61, 58]"]),
        ([1, 60, 57, 60], "output", ["layer id 60 is the final state", "auxiliary ones [1, 60, 57]"]),
        ([2, 2, 30, 58, 61], "vllm", ["layer id 2 stands there twice"]),
    ],
)  # fmt: skip
def test_refused_with_both_values(layer_ids: list[int], convention: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        positions("store", layer_ids, convention, KIMI)
    assert all(word in str(caught.value) for word in words), caught.value
