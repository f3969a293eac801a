"""capture-features in a process of its own: `python capture_driver.py CONFIG.json TRACES`; prints its artifacts.

Ray's client does not connect in a process that has run hundreds of other tests before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flows.capture_features import capture_features
from slipstream.config import RunConfig


def main(config: Path, traces: str) -> None:
    """Captures; the last line of output is JSON: the store and its shards."""
    store, shards = capture_features(RunConfig.model_validate_json(config.read_text()), traces)
    print(json.dumps([artifact.model_dump() for artifact in (store, *shards)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
