"""One embedded Prefect for all contract tests, and results of each test in a folder of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, PREFECT_RESULTS_LOCAL_STORAGE_PATH, temporary_settings
from prefect.testing.utilities import prefect_test_harness

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server on the loopback interface with a database of its own."""
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield


@pytest.fixture
def results(tmp_path: Path, prefect_server: None) -> Iterator[None]:
    """Results of the test in a folder of its own."""
    with temporary_settings({PREFECT_RESULTS_LOCAL_STORAGE_PATH: tmp_path / "results"}):
        yield
