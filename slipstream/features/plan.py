"""What a capture will ask for, and whether it fits, before a server starts.

From the traces' lengths and the row pool: rows, tokens and bytes of every shard, how much of that is missing, the
time at the stated rate, and the free disk under the pool.  Only what is missing counts: a capture that is continued
needs the rest.  With `features.store: none` nothing is captured, so there are no shards and no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.errors import InputError
from slipstream.features.pool import FeaturePool
from slipstream.features.recipe import form, open_pool
from slipstream.features.rows import Row, plan_shards, read_rows
from slipstream.features.shards import Shard
from slipstream.plan import RESERVE, free_bytes


@dataclass(frozen=True)
class Load:
    """Rows and their tokens."""

    rows: int = 0
    tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.rows + other.rows, self.tokens + other.tokens)


@dataclass(frozen=True)
class ShardPlan:
    """One shard: everything in it, and what the pool lacks (a token sequence that occurs twice is asked for once)."""

    shard: Shard
    whole: Load
    missing: Load


@dataclass(frozen=True)
class CapturePlan:
    """The shards of a capture and what they cost.

    `servers` run side by side, `gpus_each` GPUs each (0 on a CPU and for named endpoints); on Ray one a shard, as far
    as its GPUs reach.
    `bytes_per_token` are the states' bytes in the store; `free` and `reserve` are bytes of the pool's file system.
    """

    shards: tuple[ShardPlan, ...]
    servers: int
    gpus_each: int
    bytes_per_token: int
    tokens_per_s: float
    free: int
    reserve: int

    @property
    def whole(self) -> Load:
        """All rows."""
        return sum((part.whole for part in self.shards), Load())

    @property
    def missing(self) -> Load:
        """What is to be captured."""
        return sum((part.missing for part in self.shards), Load())

    @property
    def missing_bytes(self) -> int:
        """Bytes that the capture will write."""
        return self.missing.tokens * self.bytes_per_token

    @property
    def needed(self) -> int:
        """Bytes that must be free: what is written, RESERVE of it, and the reserve."""
        return round(self.missing_bytes * (1 + RESERVE)) + self.reserve if self.missing_bytes else 0

    @property
    def seconds(self) -> float:
        """Expected time of the capture at `tokens_per_s`."""
        return self.missing.tokens / self.tokens_per_s

    def require_space(self, folder: Path) -> None:
        """Raises InputError, with what is needed and what is free, when the missing states do not fit."""
        if self.needed > self.free:
            raise InputError(
                f"features: {self.missing_bytes / 1e9:,.2f} GB of hidden states are missing and "
                f"{(self.needed - self.missing_bytes) / 1e9:,.2f} GB stay free, so {self.needed / 1e9:,.2f} GB are "
                f"needed, but {folder} has {self.free / 1e9:,.2f} GB free; make room, move the work directory, or set "
                "features.store to fp8 or none"
            )


def plan_capture(workdir: Path, config: RunConfig, traces: Artifact) -> CapturePlan:
    """The plan for these traces; starts nothing, changes nothing in the pool.

    Raises InputError when the traces have no rows.
    """
    shards = plan_shards(config, traces)
    stored = config.features.store != "none"
    servers, own = config.servers, not config.servers.features_endpoints
    planned: list[ShardPlan] = []
    if stored:
        seen: set[str] = set()
        with closing(open_pool(workdir, config)) as pool:
            planned = [_plan(shard, read_rows(config, traces, shard.start, shard.stop), pool, seen) for shard in shards]
    replicas = sum(part.missing.rows > 0 for part in planned) if servers.runner == "ray" else servers.replicas
    return CapturePlan(
        shards=tuple(planned),
        servers=replicas if own else len(servers.features_endpoints),
        gpus_each=servers.tensor_parallel if own and servers.device == "cuda" else 0,
        bytes_per_token=form(config).bytes_per_token if stored else 0,
        tokens_per_s=config.rates.features_tokens_per_s,
        free=free_bytes(workdir / "pool"),
        reserve=round(config.features.disk_reserve_gib * 2**30),
    )


def _plan(shard: Shard, rows: Iterable[Row], pool: FeaturePool, seen: set[str]) -> ShardPlan:
    whole = missing = Load()
    for row in rows:
        load = Load(1, len(row.token_ids))
        whole += load
        if row.key not in seen and pool.find(row.token_ids) is None:
            missing += load
        seen.add(row.key)
    return ShardPlan(shard, whole, missing)
