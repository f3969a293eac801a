"""The embedded default: a Prefect server for one run, in the work directory, that ends with it in every way.

Prefect's own temporary server outlives a kill -9 of the flow.  This is the same server (SQLite, no UI) as a
supervised child.  A server that PREFECT_API_URL names is used instead.  Imports no Prefect: settings are
read when it is imported, so they must stand in the environment before.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from slipstream import process
from slipstream.errors import ServerError
from slipstream.serving import free_port

STARTUP_S = 180.0
DRAIN_S = 30.0
SERVER = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}


def settings(root: Path) -> dict[str, str]:
    """Environment variables of a run without a server: results in the work directory, nothing sent anywhere."""
    return {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(root / "prefect" / "results"),
        "PREFECT_LOGGING_LEVEL": "INFO",
    }


@contextmanager
def prefect_api(root: Path) -> Iterator[None]:
    """Inside the block PREFECT_API_URL names a server that answers; raises ServerError when none comes up."""
    for name, value in settings(root).items():
        os.environ.setdefault(name, value)
    if "PREFECT_API_URL" in os.environ:
        yield
        return
    home = os.environ.setdefault("PREFECT_HOME", str(root / "prefect"))
    Path(home).mkdir(parents=True, exist_ok=True)
    port = free_port()
    line = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    line += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on"]
    child = process.start(line, root / "logs" / "prefect.log", SERVER)
    url = f"http://127.0.0.1:{port}/api"
    try:
        _wait(url, child)
        os.environ["PREFECT_API_URL"] = url
        yield
    finally:
        _drain()
        os.environ.pop("PREFECT_API_URL", None)
        child.stop()


def _drain() -> None:
    """Sends the logs and events that still wait: left to the interpreter's exit they would wait for a dead server."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=DRAIN_S)


def _wait(url: str, child: process.Process) -> None:
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline:
        if (status := child.returncode()) is not None:
            raise ServerError(f"{child.log}: Prefect's server ended with status {status}: {child.complaint()}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise ServerError(f"{child.log}: Prefect's server did not answer within {STARTUP_S:.0f} s")
