"""One JSON array, cut into its elements wherever the chunks end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.traces.json_array import elements

TEXT = st.text('ab"\\[]{},: \n😀', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner),
    max_leaves=6,
)


def cut(text: bytes, size: int) -> list[bytes]:
    """`text` in pieces."""
    return [text[i : i + size] for i in range(0, len(text), size)]


@given(st.lists(VALUES, min_size=1, max_size=6), st.integers(1, 40), st.sampled_from([None, 1]), st.booleans())
def test_the_elements_are_those_that_json_reads(values: list[Any], size: int, indent: int | None, plain: bool) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=plain).encode()
    assert [json.loads(element) for element in elements(cut(text, size))] == values


@pytest.mark.parametrize("text", [b"[1", b'[1, "2]', b"[1, [2]", b"[1] 2", b'["\\"]'])
def test_text_that_does_not_end_with_the_array(text: bytes) -> None:
    for size in (1, 100):
        with pytest.raises(ValueError, match="does not end"):
            list(elements(cut(text, size)))
