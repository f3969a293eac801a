"""Hidden states that come with the answers, as the generation sees them (`features.capture_while_generating`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp

from slipstream.chat import Server
from slipstream.serving import Endpoint


class States(Protocol):
    """Takes what servers wrote beside their answers.  Nothing that it meets may end or slow the generation."""

    def server(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> Server:
        """The server behind `endpoint`, which is asked for states with every answer."""

    def take(self, server: Server, file: str | None, token_ids: Sequence[int] | None) -> None:
        """Takes the file that `server` named with an answer, at once and without waiting.

        `token_ids` are the row's, prompt and output; None for an answer that is rejected.
        """

    async def settle(self) -> None:
        """Returns when nothing that was taken is under way any more."""

    def figures(self) -> dict[str, Any]:
        """What became of the states, for the manifest."""
