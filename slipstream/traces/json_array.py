"""A file that is one JSON array, element by element: neither the whole text nor all values are held at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

SIGNS = re.compile(rb'["\\\[\]{},]')


def elements(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The elements of the array whose text arrives in `chunks`, as undecoded bytes.

    Cuts at the commas of the first level only, so that an element that is no JSON spoils no other.  Raises
    ValueError when the text does not end with the array.
    """
    element = bytearray()
    depth, quoted = 0, False
    escaped, before = -1, 0  # offsets in the whole text: of an escaped byte, of the chunk
    for chunk in chunks:
        start = 0
        for found in SIGNS.finditer(chunk):
            at, sign = found.start(), found.group()
            if before + at == escaped:
                continue
            if quoted:
                if sign == b"\\":
                    escaped = before + at + 1
                quoted = sign != b'"'
            elif sign == b'"':
                quoted = True
            elif sign in {b"[", b"{"}:
                depth += 1
                start = at + 1 if depth == 1 else start
            elif sign in {b"]", b"}"} or (sign == b"," and depth == 1):
                depth -= sign != b","
                if depth == 0 or sign == b",":
                    yield bytes(element + chunk[start:at])
                    element.clear()
                    start = at + 1
        element += chunk[start:]
        before += len(chunk)
    if depth or quoted or element.strip():
        raise ValueError("the JSON array does not end where the file ends")
