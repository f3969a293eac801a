"""A rank that another one left: what it raises then is not what went wrong."""

from __future__ import annotations

import torch.distributed as dist


def lost_peer(error: Exception) -> bool:
    """Whether a rank failed because another one was gone; gloo raises plain RuntimeErrors that name its source file."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
