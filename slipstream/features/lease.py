"""Extraction servers as a shard sees them."""

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
    sentence that says how it ended.  `owned`: it was started here, so that another one takes its place when it
    dies; others are waited for.  `others` write into the same folder, and the least loaded takes the next request.
    """

    endpoint: Endpoint
    storage: Path
    complaint: Callable[[], str | None] = lambda: None
    owned: bool = False
    others: tuple[Endpoint, ...] = ()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them."""
        return (self.endpoint, *self.others)


Lend = Callable[[], AbstractContextManager[Lease]]
