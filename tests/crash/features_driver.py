"""The features stage as a process that can be killed, for `test_features_crash`.

Reads `<config.yaml> <traces folder>` lines; forks for each, so that imports are paid once.  Prints the child's process
id, and when it has ended its exit status.  A child captures every shard in turn and assembles the store; errors go to
stderr.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import datasets  # noqa: F401 - these are imported before the fork, for speed
import openai  # noqa: F401
import pyarrow.parquet  # noqa: F401
import torch

from slipstream.artifact import open_artifact
from slipstream.config import load_config
from slipstream.features import servers, shard_stage, store
from slipstream.features.rows import plan_shards
from slipstream.progress import silent


def features(config_file: Path, traces_folder: Path) -> None:
    """Both halves of the stage."""
    config, traces = load_config(config_file), open_artifact(traces_folder)
    with servers.shared(config.root, config):
        shards = [
            shard_stage.capture_shard(
                config.root, config, traces, shard, lambda: servers.lend(config.root, config), silent
            )
            for shard in plan_shards(config, traces)
        ]
    store.assemble(config.root, config, traces, shards)


def main() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        config, traces = line.split()
        if (child := os.fork()) == 0:
            try:
                features(Path(config), Path(traces))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
