"""Which decoder a drafter gets: the configured shape, a published drafter's, or one made from the verifier."""

from __future__ import annotations

from slipstream.config import DraftShape, RunConfig
from slipstream.errors import InputError


def resolve(config: RunConfig) -> DraftShape:
    """The shape of the drafter's decoder layers; raises InputError when nothing says it."""
    if config.drafter.shape is None:
        raise InputError("drafter.shape: not set")
    return config.drafter.shape
