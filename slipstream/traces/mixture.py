"""How many prompts each source gives when their shares are fixed."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def mixture(available: Sequence[int], weights: Sequence[float | None], limit: int | None) -> list[int]:
    """How many of the `available` prompts of each source to use.

    In proportion to `weights` (relative; all or none), as many as the scarcest source allows and `limit` at most;
    what is left by rounding down goes to the largest remainders.  Without weights every source gives in proportion
    to what it has: everything, or `limit`.
    """
    # the decimals as written: as binary fractions, 0.1 and 0.9 of 10 and 90 prompts would come out at 99
    parts = [Fraction(n if w is None else repr(w)) for n, w in zip(available, weights, strict=True)]
    whole = sum(parts)
    if not whole:
        return [0] * len(parts)
    total = min(n * whole // part for n, part in zip(available, parts, strict=True) if part)
    if limit is not None:
        total = min(total, limit)
    exact = [part * total / whole for part in parts]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares
