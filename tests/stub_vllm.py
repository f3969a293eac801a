"""`python -m vllm.entrypoints.openai.api_server` as far as a hidden-state server needs it: the stub in a process.

An executable of these two lines is a serve environment's interpreter for a test:

    #!/bin/sh
    exec python tests/stub_vllm.py "$@"
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from pathlib import Path

from stub_server import StubServer


def main(arguments: list[str]) -> None:
    """Serves until it is ended; states are as wide as the named verifier's."""
    given = dict(itertools.pairwise(arguments))
    config = json.loads((Path(given["--model"]) / "config.json").read_text())
    layers = json.loads(given["--speculative-config"])["draft_model_config"]["hf_config"]
    storage = json.loads(given["--kv-transfer-config"])["kv_connector_extra_config"]["shared_storage_path"]
    server = StubServer(
        layers=len(layers["eagle_aux_hidden_state_layer_ids"]),
        hidden=config.get("text_config", config)["hidden_size"],
        port=int(given["--port"]),
    )
    with server:
        server.storage = Path(storage)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
