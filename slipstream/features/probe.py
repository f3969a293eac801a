"""The probe of a shard: some of its samples are captured again, and what is stored must be what the server computes.

    probe.json   what was compared, how well it agreed, and what could not be probed, with the reason

For `features.probe_samples` samples that no probe has vouched for yet, those with the smallest keys: every layer
against a second capture, and the final state against the log-probabilities that the server gives in the same request.
With a layer reference, the server's layers against it first.  The shard's other samples came the same way, so that a
probe that passes vouches for all of them, and reused ones are not probed again.  Unprobed ones that were there before
(a killed run's, `capture_while_generating`'s) came another way: as many of them are probed besides, those that an
earlier probe failed with first.

A difference is not tried again: it is named (`diagnosis`), and the stage fails.  The samples stay where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream import atomic, verifier
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.errors import StageFailed
from slipstream.features import diagnosis, recipe, reference, vouched
from slipstream.features.diagnosis import Layers, Sample
from slipstream.features.lease import Lease
from slipstream.features.pool import FeaturePool, mapped
from slipstream.features.recapture import recapture
from slipstream.features.rows import Row
from slipstream.features.sample import BadSample, states_of
from slipstream.features.tolerance import TOLERANCES, Tolerance
from slipstream.verifier_ends import Head, Unreadable, read_head

FILE = "probe.json"
TWINS = 64  # stored samples of the same length that are looked through for misplaced states


@dataclass
class Table:
    """What `probe.json` holds; figures are None where nothing was compared."""

    tolerance: Tolerance
    layer_ids: list[int]
    reference: str | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    not_probed: list[str] = field(default_factory=list)
    finding: str | None = None

    def summary(self) -> dict[str, Any]:
        """The figures of the whole shard: worst relative error, lowest agreement, largest mean difference."""
        probed = [sample["final"] for sample in self.samples if sample["final"]]
        return {
            "samples": len(self.samples),
            "layer_ids": self.layer_ids,
            "relative_error": max((max(sample["relative_errors"]) for sample in self.samples), default=None),
            "argmax": min((final["argmax"] for final in probed), default=None),
            "mean_difference": max((final["mean_difference"] for final in probed), default=None),
            "reference": self.reference,
            "not_probed": self.not_probed,
        }


def probe(
    config: RunConfig,
    pool: FeaturePool,
    rows: Sequence[Row],
    lease: Lease,
    layers: Artifact | None,
    folder: Path,
    final_state: str = recipe.PRE_NORM,
    captured: Collection[str] = (),
) -> Table:
    """Probes `rows`, which lie in the pool, as far as unprobed; writes `folder`/probe.json and vouches for them.

    `layers` is the layer reference, `captured` are the keys of those that came just now.  Raises StageFailed that
    names what is wrong and which samples show it.
    """
    tolerance = TOLERANCES[pool.form.dtype]
    shape = verifier.load_shape(config.verifier)
    ids = Layers(verifier.capture_ids(config.features.layer_ids, shape), shape.num_layers)
    table = Table(tolerance, list(ids.ids))
    fresh = vouched.unprobed(pool.folder, [row.key for row in rows])
    chosen = _chosen(config, rows, fresh, captured, vouched.doubted(pool.folder, fresh))
    if not config.features.probe_samples:
        table.not_probed.append("features.probe_samples is 0")
    where = str(folder)
    if layers is None:
        table.not_probed.append(f"layer ids: {_without_reference(config)}")
    elif chosen:
        table.reference = layers.key
        table.finding = reference.check(config, layers, lease, pool.form, tolerance)
    head = _head(config, table) if chosen else None
    for row in chosen:
        if table.finding is not None:
            break
        table.finding = _sample(config, pool, row, rows, lease, ids, final_state, head, table)
        where = str(pool.path(row.key))
    atomic.write_json(folder / FILE, {**asdict(table), "summary": table.summary()})
    if table.finding is not None:
        vouched.doubt(pool.folder, fresh)
        raise StageFailed(
            f"features: {table.finding}; the probe stopped at {where}, and {len(fresh)} samples of this shard are kept "
            f"unprobed in {pool.folder}: delete that folder when the verifier or its server is right again"
        )
    if config.features.probe_samples:
        vouched.vouch(pool.folder, fresh)
    return table


def _chosen(
    config: RunConfig, rows: Sequence[Row], fresh: Collection[str], captured: Collection[str], doubted: Collection[str]
) -> list[Row]:
    """The rows to probe: of those that were there before and of those `captured` now, `probe_samples` each."""
    by_key = {row.key: row for row in rows if row.key in fresh}
    before = sorted((key for key in by_key if key not in captured), key=lambda key: (key not in doubted, key))
    now = sorted(key for key in by_key if key in captured)
    count = config.features.probe_samples
    return [by_key[key] for key in (*before[:count], *now[:count])]


def _without_reference(config: RunConfig) -> str:
    if config.servers.features_endpoints:
        return "servers.features_endpoints have the layers that they were started with"
    return "no layer reference" if config.features.probe_all_layers else "features.probe_all_layers is off"


def _head(config: RunConfig, table: Table) -> Head | None:
    try:
        return read_head(verifier.folder_of(config.verifier))
    except Unreadable as reason:
        table.not_probed.append(f"final state: {reason}")
        return None


def _sample(
    config: RunConfig,
    pool: FeaturePool,
    row: Row,
    rows: Sequence[Row],
    lease: Lease,
    ids: Layers,
    final_state: str,
    head: Head | None,
    table: Table,
) -> str | None:
    """Compares one sample and adds it to the table; returns what is wrong with it."""
    try:
        again = recapture(lease, row.token_ids, pool.form, config.features.request_timeout_s, len(table.samples))
    except BadSample as error:
        return f"trace {row.trace}: captured again it could not be stored: {error}"
    if again.refusal and (reason := f"final state: {again.refusal}") not in table.not_probed:
        table.not_probed.append(reason)

    def twins() -> Iterable[tuple[str, torch.Tensor]]:
        same = [other for other in rows if len(other.token_ids) == len(row.token_ids) and other.key != row.key]
        return ((str(pool.path(other.key)), _stored(pool, other.key)) for other in same[:TWINS])

    states = again.states
    if final_state == recipe.POST_NORM:
        if head is None:
            return f"trace {row.trace}: its final state has passed a norm that cannot be read: {table.not_probed[-1]}"
        states[:, -1] = head.normed(states[:, -1])
    sample = Sample(row.token_ids, _stored(pool, row.key), states, again.logprobs, twins)
    final = None if head is None else diagnosis.agreement(sample, head, final_state, table.tolerance)
    entry = {"trace": row.trace, "key": row.key, "tokens": len(row.token_ids)}
    table.samples.append(
        entry | {"relative_errors": diagnosis.errors(sample), "final": None if final is None else asdict(final)}
    )
    fault = diagnosis.store_fault(sample, ids, final_state, head, table.tolerance)
    if fault is None and head is not None:
        fault = diagnosis.final_fault(sample, final_state, head, table.tolerance)
    return None if fault is None else f"trace {row.trace}: {fault}"


def _stored(pool: FeaturePool, key: str) -> torch.Tensor:
    with mapped(pool.path(key)) as data:
        return states_of(data, pool.form)
