"""How many tokens of answer fit after a conversation, measured by the server's own tokenizer where it is close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from slipstream.chat import Message, Refused, Server
from slipstream.config import VerifierConfig
from slipstream.encoding import encode
from slipstream.errors import InputError
from slipstream.local_tokenizer import LocalTokenizer

TEMPLATE_MARGIN = 16


class Room:
    """The context of the servers that answer together: the smallest one's, None while no server has told one.

    No token is shorter than a byte, so a conversation with fewer bytes than there is room needs no measuring.
    """

    def __init__(self, wanted: int, verifier: VerifierConfig) -> None:
        self.wanted = wanted
        self.context: int | None = None
        self.fixed = False  # once set, a server with a smaller context is refused: prompts were measured without it
        self._verifier = verifier
        self._template_tokens = 0  # what the chat template adds to a conversation, and a margin
        self._local: LocalTokenizer | None = None
        self._no_local = False

    async def admit(self, server: Server) -> None:
        """Reads a server's context; raises Refused when it came too late with a smaller one."""
        limit = await server.context()
        if self.fixed and self.context is not None and limit is not None and limit < self.context:
            raise Refused(f"takes {limit} tokens, the others {self.context}")
        if limit is not None:
            self.context = min(limit, self.context or limit)
        with suppress(Refused):  # an engine whose /tokenize takes text alone
            ids = await server.tokenize_chat([{"role": "user", "content": "a"}], [], {})
            self._template_tokens = max(self._template_tokens, len(ids or ()) + TEMPLATE_MARGIN)

    @property
    def settled_bytes(self) -> int:
        """A record of no more bytes than this fits with a full answer; without a context, everything does."""
        if self.context is None:
            return 1 << 62
        return max(0, self.context - self.wanted - self._template_tokens)

    async def length(
        self, server: Server, messages: Sequence[Message], tools: Sequence[Message], template: Mapping[str, Any]
    ) -> int | None:
        """Tokens of a conversation with the generation prompt; None when nobody here can tell."""
        with suppress(Refused):
            if (ids := await server.tokenize_chat(messages, tools, template)) is not None:
                return len(ids)
        if self._local is None and not self._no_local:
            try:
                self._local = LocalTokenizer(self._verifier)
            except InputError:
                self._no_local = True
        with suppress(Refused):
            return None if self._local is None else len(await self._local.tokenize_chat(messages, tools, template))
        return None

    def after(self, length: int) -> int:
        """Tokens of answer to ask for after so many tokens; below 1 when nothing fits."""
        return self.wanted if self.context is None else min(self.wanted, self.context - length)

    async def tokens(
        self, server: Server, messages: Sequence[Message], tools: Sequence[Message], template: Mapping[str, Any]
    ) -> int:
        """Tokens of answer to ask this server for; below 1 when nothing fits."""
        if len(encode([messages, tools])) <= self.settled_bytes:
            return self.wanted
        length = await self.length(server, messages, tools, template)
        return self.wanted if length is None else self.after(length)
