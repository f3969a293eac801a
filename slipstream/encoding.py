"""JSON of what models write: fast, and also where it holds half of a surrogate pair, which orjson refuses."""

from __future__ import annotations

import json
from typing import Any

import orjson


def encode(value: Any) -> bytes:
    """`value` as JSON bytes."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode("ascii")


def decode(data: bytes | str) -> Any:
    """The value in JSON bytes; raises ValueError when it is none."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
