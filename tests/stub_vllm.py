"""`python -m vllm.entrypoints.openai.api_server` as far as a hidden-state server needs it: the stub in a process.

An executable of these two lines is a serve environment's interpreter for a test (`interpreter` writes it):

    #!/bin/sh
    exec python tests/stub_vllm.py "$@"

STUB_DELAY_S is the time of one answer.  Into the folder STUB_SEEN goes `<pid>.json`: the node (NODE_NAME) and the
GPUs that the server sees, and `started_by`, the process that wanted it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from pathlib import Path

from stub_server import Capture, StubServer


def interpreter(path: Path) -> Path:
    """Writes the executable at `path` and returns it."""
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    path.chmod(0o755)
    return path


def _tell(folder: Path) -> None:
    supervisor = Path(f"/proc/{os.getppid()}/stat").read_text()  # slipstream.process; its parent asked for the server
    seen = {name: os.environ.get(name) for name in ("NODE_NAME", "CUDA_VISIBLE_DEVICES")}
    temporary = folder / f"{os.getpid()}.tmp"
    temporary.write_text(json.dumps(seen | {"started_by": int(supervisor.rpartition(")")[2].split()[1])}))
    temporary.rename(temporary.with_suffix(".json"))


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
    server.model = given["--model"]
    delay_s = float(os.environ.get("STUB_DELAY_S", "0"))
    server.on_capture(lambda tokens, number: Capture(delay_s=delay_s))
    with server:
        server.storage = Path(storage)
        if folder := os.environ.get("STUB_SEEN"):
            _tell(Path(folder))
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
