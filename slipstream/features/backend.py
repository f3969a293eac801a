"""speculators' own trainer over a checked store: its hidden-state backend `slipstream`.

    python -m slipstream.features.backend --hidden-states-backend slipstream --data-path <store> …

is `speculators train` with that backend registered (speculators finds backends by import alone, so its own command
knows `file` and `fp8` only; with those it trains on the same folder, unchecked).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from hs_connectors import FileBackend, HiddenStatesBackend

from slipstream.features.loader import StoreTransfer


@HiddenStatesBackend.register("slipstream")
class StoreBackend(HiddenStatesBackend):
    """Reads the features artifact at `--data-path`, native or fp8; `--checked-reads` as `features.checked_reads`."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """The one setting."""
        parser.add_argument(
            "--checked-reads", type=float, default=1.0, help="Share of samples whose checksum is compared."
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """A store needs no server of its own kind."""
        FileBackend.add_launch_args(parser)

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> StoreTransfer:
        """Raises Damaged for a store that is not complete."""
        return StoreTransfer(Path(data_path), args.checked_reads, getattr(torch, args.hidden_states_dtype))

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """As for plain files: stores are captured by this project's own features stage."""
        return FileBackend.build_kv_transfer_config(args)


if __name__ == "__main__":
    from speculators.train.cli import main
    from speculators.train.config import TrainConfig

    main(TrainConfig.resolve())
