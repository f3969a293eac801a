"""Deployment steps for prefect.yaml: a configuration file as a deployment's parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.config import load_config


def load(path: str) -> dict[str, Any]:
    """What a deployment takes from the configuration in `path`.

    `config`: its validated values.  `root`: the directory that its relative paths start from.  `env`: variables of
    the flow's process, among them where results lie: in the work directory, so that every worker finds them.

    Used as a build step, so that prefect.yaml repeats nothing of deployments/*.yaml:

        build:
          - tasks.deployment.load: {id: pocket, path: deployments/pocket.yaml}
        parameters: {config: "{{ pocket.config }}"}
    """
    config = load_config(Path(path))
    env = {
        "SLIPSTREAM_WORKDIR": str(config.root),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(config.root / "prefect" / "results"),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds; the least that Prefect takes
        "DO_NOT_TRACK": "1",
    }
    return {"config": config.model_dump(mode="json"), "root": str(Path.cwd()), "env": env}
