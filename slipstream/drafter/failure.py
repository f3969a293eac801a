"""What ended a training process, as the sentence it ended with: a file beside the job, not the last line of a log.

With several data workers and ranks a log ends in the stack traces of those that were ended along.
"""

from __future__ import annotations

import json
from pathlib import Path

from slipstream import atomic, errors
from slipstream.errors import SlipstreamError, StageFailed

FILE = "failure.json"


def sentence(error: SlipstreamError) -> str:
    """The error's own sentence.

    An error of a data worker arrives as its class around the worker's whole trace, whose last line is the sentence
    (torch.utils.data, ExceptionWrapper.reraise).
    """
    last = str(error).strip().splitlines()[-1]
    return last.removeprefix(f"{type(error).__module__}.{type(error).__qualname__}: ")


def record(folder: Path, error: SlipstreamError) -> None:
    """Leaves the error in `folder`."""
    atomic.write_json(folder / FILE, {"error": type(error).__name__, "message": sentence(error)})


def take(folder: Path) -> SlipstreamError | None:
    """The error that was left in `folder`, as the class it had; None without one.  It is gone then."""
    path = folder / FILE
    if not path.exists():
        return None
    found = json.loads(path.read_bytes())
    path.unlink()
    kind = getattr(errors, found["error"], StageFailed)
    error: SlipstreamError = kind(found["message"])
    return error
