"""Errors that a user reads: one sentence that names the file, row or id and what to do.

`SlipstreamError.transient` is the single place that decides what may be tried again: connections,
408, 409, 425, 429 and 5xx.  Everything else (a 400, a schema or digest mismatch, a bad file) fails
at once.
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base of every error that Slipstream raises on purpose."""

    transient = False


class InputError(SlipstreamError):
    """The configuration or an input file is wrong; nothing was started."""


class StageFailed(SlipstreamError):
    """A stage ran and its outcome cannot be used (too many losses, a failed check)."""


class Damaged(SlipstreamError):
    """A folder that should be a complete artifact is not."""


class ServerError(SlipstreamError):
    """A server did not start, died, or gave an answer that breaks its contract."""


class TransientError(SlipstreamError):
    """A failure that another attempt may not meet: a lost connection, an overloaded server."""

    transient = True


TRANSIENT_STATUS = frozenset({408, 409, 425, 429})  # and every 5xx


def is_transient_status(status: int) -> bool:
    """Whether a request that got this HTTP status may be sent again."""
    return status in TRANSIENT_STATUS or status >= 500
