"""Digests against hashlib over JSON written by hand."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.digest import canonical_json, digest, digest_tokens


def test_canonical_json_is_sorted_and_tight() -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": {"ü": True}}) == '{"a":{"ü":true},"b":[1,2.5,null]}'.encode()


def test_digest_is_sha256_of_the_canonical_form() -> None:
    assert digest({"b": 1, "a": "x"}) == hashlib.sha256(b'{"a":"x","b":1}').hexdigest()[:32]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [float("-inf")]}])
def test_what_json_cannot_hold_has_no_digest(value: object) -> None:
    with pytest.raises(ValueError, match="JSON"):
        digest(value)


def test_tokens_are_hashed_as_little_endian_words() -> None:
    tokens = [0, 1, 163_839, 2**32 - 1]
    assert digest_tokens(tokens) == hashlib.sha256(np.array(tokens, dtype="<u4").tobytes()).hexdigest()[:32]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=6), st.lists(st.integers(0, 2**32 - 1), max_size=6))
def test_other_tokens_have_another_digest(one: list[int], other: list[int]) -> None:
    assert (digest_tokens(one) == digest_tokens(other)) == (one == other)
