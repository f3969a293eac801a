"""One sequence through an extraction server once more: its states, and in the same request its log-probabilities.

vLLM's `prompt_logprobs` gives, for each prompt position after the first, the likeliest tokens given those before it
(and the token that stands there).  A server computes them for all positions of a prefill step at once: 163,840
float32 values a position, so that a long sample is asked for states alone and its beginning for log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream import chat
from slipstream.chat import Refused
from slipstream.concurrent import run_async
from slipstream.errors import ServerError
from slipstream.features.extraction import ExtractionServer
from slipstream.features.lease import Lease
from slipstream.features.pool import mapped
from slipstream.features.sample import Form, check, states_of

TOP = 5
LOGPROB_TOKENS = 1024  # at most so many positions are asked for at once: 0.7 GB of float32 at 163,840 tokens


@dataclass(frozen=True)
class Recapture:
    """States float32 [tokens, layers, hidden] and, for position p ≥ 1, token → log-probability after tokens 0 … p - 1.

    `logprobs[0]` is empty; `logprobs` is None when the server gave none, and `refusal` says why.
    """

    states: torch.Tensor
    logprobs: list[dict[int, float]] | None
    refusal: str = ""


def recapture(lease: Lease, token_ids: Sequence[int], form: Form, timeout_s: float, at: int = 0) -> Recapture:
    """Captures `token_ids` (samples of this `form`) on the lease's endpoint `at`, counted round.

    What the server writes is read and removed.  Raises TransientError for a lost connection or no file, ServerError
    for an answer that breaks the contract, and BadSample for states that could not have been stored.
    """
    return run_async(_recapture(lease, list(token_ids), form, timeout_s, at))


async def _recapture(lease: Lease, token_ids: list[int], form: Form, timeout_s: float, at: int) -> Recapture:
    async with chat.session(timeout_s) as session:
        endpoint = lease.endpoints[at % len(lease.endpoints)]
        server = ExtractionServer(endpoint, session, lease.storage)
        try:
            beginning = token_ids[:LOGPROB_TOKENS]
            try:
                asked = await _ask(server, beginning, form, timeout_s, prompt_logprobs=TOP)
            except Refused as refused:
                plain = await _ask(server, token_ids, form, timeout_s)
                return replace(plain, refusal=f"the server refuses prompt_logprobs: {refused}")
            if len(beginning) == len(token_ids):
                return asked
            return replace(asked, states=(await _ask(server, token_ids, form, timeout_s)).states)
        except Refused as refused:
            raise ServerError(f"{endpoint.url}: {refused}") from refused
        finally:
            server.close()


async def _ask(
    server: ExtractionServer, token_ids: list[int], form: Form, timeout_s: float, **fields: object
) -> Recapture:
    async with server.sample(token_ids, timeout_s, **fields) as written:
        with mapped(written.path) as data:
            check(data, token_ids, form)
            states = states_of(data, form)
        logprobs = _logprobs(written.answer, len(token_ids))
    return Recapture(states, logprobs, "" if logprobs else "the server answers without prompt_logprobs")


def _logprobs(answer: Mapping[str, Any], tokens: int) -> list[dict[int, float]] | None:
    """vLLM's `choices[0].prompt_logprobs`: null, then {token id as text: {"logprob": …}} a position."""
    try:
        given = answer["choices"][0]["prompt_logprobs"]
        rows = [{int(token): float(entry["logprob"]) for token, entry in (row or {}).items()} for row in given]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return rows if len(rows) == tokens and all(rows[1:]) else None
