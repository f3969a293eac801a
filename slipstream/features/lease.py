"""An extraction server as a shard sees it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from slipstream.serving import Endpoint


@dataclass(frozen=True)
class Lease:
    """A server that one shard may use, the folder it writes into, and how it is known to be dead.

    `complaint()` is None while the server lives or nobody can tell (an endpoint that the user named), else one
    sentence that says how it ended.
    """

    endpoint: Endpoint
    storage: Path
    complaint: Callable[[], str | None] = lambda: None


Lend = Callable[[], AbstractContextManager[Lease]]
