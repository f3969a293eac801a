"""`slipstream import`: an existing store into the work directory of a configuration.

    survey    tokens, masks and forms of all samples                     (refusals: nothing was started or written)
    measure   which layers these are, and whether the last is the final  (a server, or the rows' own text)
    adopt     states into the row pool, checked one by one
    write     the traces artifact, then the features artifact from it

Killed at any instant and started again it continues: rows lie in the pool, artifacts are complete when their
manifest is there.  The store is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream import verifier
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.errors import InputError, StageFailed
from slipstream.features import disk, shard_stage, vouched
from slipstream.features import store as features_store
from slipstream.features.lease import Lease
from slipstream.features.pool import FeaturePool
from slipstream.features.recipe import POST_NORM, PRE_NORM, pool_of
from slipstream.features.rows import plan_shards
from slipstream.imports import mappings, rows
from slipstream.imports.adopt import adopt
from slipstream.imports.final_state import AFTER
from slipstream.imports.found import Store
from slipstream.imports.judged import judge, judge_statement, refuse_losses
from slipstream.imports.measure import Measured, Said, measure
from slipstream.imports.opened import open_store
from slipstream.imports.survey import Survey, surveying
from slipstream.plan import free_bytes
from slipstream.progress import Progress, Report, silent

FINAL_STATES = {False: PRE_NORM, True: POST_NORM}


@dataclass(frozen=True)
class Imported:
    """What an import made: both artifacts, how the layers were found out, what there is to say about mappings."""

    traces: Artifact
    features: Artifact
    measured: Measured
    adopted: int
    mappings: list[str]


def run(workdir: Path, config: RunConfig, path: Path, said: Said, report: Report = silent) -> Imported:
    """Imports the store in `path`.

    Raises InputError for everything that the store, the configuration or `said` have wrong, StageFailed when more
    samples are lost than `features.max_lost_share`.
    """
    _refuse(config)
    shape = verifier.load_shape(config.verifier)
    wanted = verifier.capture_ids(config.features.layer_ids, shape)
    store = open_store(path.absolute())
    judge_statement(store, config)
    said = said.completed(store, shape.num_layers)
    with surveying(workdir, store, config.prompts.split_seed, _counting(report, "samples read")) as survey:
        judge(store, survey, config, len(said.layer_ids) if said.layer_ids else None)
        measured = measure(workdir, config, store, survey, said, wanted)
        final_state = FINAL_STATES[measured.final_state == AFTER]
        with disk.explained(workdir), closing(pool_of(workdir, config, final_state)) as pool:
            _require_room(store, survey, pool)
            adopted = adopt(workdir, store, survey, measured.positions, pool, _counting(report, "samples adopted"))
            refuse_losses(store, survey, config)
            vouched.vouch(pool.folder, [row.key for row in survey.usable()])
        traces = rows.write(workdir, config, store, survey, final_state, measured.recorded())
    features = _features(workdir, config, traces)
    return Imported(traces, features, measured, adopted, mappings.describe(store.mappings, shape.vocab_size))


def headline(made: Imported) -> str:
    """One line about what was taken over and how its layers are known."""
    counts = made.features.manifest().counts
    how = (
        "measured on a server"
        if made.measured.by == "server"
        else ("NOT measured on a server, only the last state was checked by the rows' own text")
    )
    return (
        f"{counts['rows']} samples, {counts['tokens']} tokens, {made.adopted} of them new; layer ids "
        f"{made.measured.layer_ids} in vLLM's convention, the last one {made.measured.final_state} the final norm "
        f"({how})"
    )


def _refuse(config: RunConfig) -> None:
    if config.features.store == "none":
        raise InputError("features.store: none keeps no states, so there is nothing to import into; set native or fp8")
    if config.features.capture_while_generating:
        raise InputError(
            "features.capture_while_generating: true takes rows without their last token and a store holds whole ones; "
            "set it to false to import"
        )


def _counting(report: Report, unit: str) -> Callable[[int, int], None]:
    return lambda done, total: report(Progress(done, total, unit))


def _require_room(store: Store, survey: Survey, pool: FeaturePool) -> None:
    """Raises InputError when the states that the pool lacks do not fit beside it."""
    rows = (row.sample.token_ids.tolist() for row in survey.usable())
    missing = sum(len(tokens) for tokens in rows if pool.find(tokens) is None)
    needed, free = missing * pool.form.bytes_per_token, free_bytes(pool.folder)
    if needed > free:
        raise InputError(
            f"{store.folder}: {needed / 1e9:,.2f} GB of its states are copied into {pool.folder}, which has "
            f"{free / 1e9:,.2f} GB free; make room there or move the work directory"
        )


def _features(workdir: Path, config: RunConfig, traces: Artifact) -> Artifact:
    """What the run will find: the shards and the store of the imported rows, all of them out of the pool."""
    imported = config.model_copy(update={"traces": config.traces.model_copy(update={"imported": traces.path})})
    shards = [
        shard_stage.capture_shard(workdir, imported, traces, shard, _no_server, silent)
        for shard in plan_shards(imported, traces)
    ]
    return features_store.assemble(workdir, imported, traces, shards)


@contextmanager
def _no_server() -> Iterator[Lease]:
    raise StageFailed("import: a sample left the pool while it was imported; run the import again")
    yield
