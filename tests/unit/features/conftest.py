"""Shared by the tests of hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slipstream.features.pool import FeaturePool
from slipstream.features.sample import Form


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FeaturePool]:
    """An empty pool of four layers, width eight."""
    with closing(FeaturePool(tmp_path, "r", Form(4, 8, "float32"))) as opened:
        yield opened
