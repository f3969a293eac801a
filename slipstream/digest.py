"""Digests of values: SHA-256 over canonical JSON, so that equal values give equal names anywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np


def canonical_json(value: Any) -> bytes:
    """`value` as JSON bytes with sorted keys and no white space; raises ValueError on NaN or infinity."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def digest(value: Any) -> str:
    """32 hex digits that name `value` (a JSON-serialisable object)."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:32]


def digest_tokens(token_ids: Iterable[int]) -> str:
    """32 hex digits that name a sequence of token ids (each below 2**32)."""
    return hashlib.sha256(np.fromiter(token_ids, dtype="<u4").tobytes()).hexdigest()[:32]
