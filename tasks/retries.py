"""What a task may try again: transient failures only, a bounded number of times, with back-off."""

from __future__ import annotations

from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from slipstream.errors import SlipstreamError

RETRY_DELAYS_S = [10.0, 60.0]


def is_transient(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether the failure is one that another attempt may not meet."""
    try:
        state.result(raise_on_failure=True)
    except SlipstreamError as error:
        return error.transient
    except (ConnectionError, TimeoutError):
        return True
    except Exception:
        return False
    return False
