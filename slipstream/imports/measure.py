"""How the layers of a store are found out: what is said, what a server measures, what the rows' own text shows.

A server decides: the beginnings of a few samples are captured at all layers and each position is compared with each
id.  Without one (a login host, a verifier that does not fit) the convention must be said, and the last state must find
the rows as surprising as its own distribution does (`final_state`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from slipstream import serving, verifier
from slipstream.config import RunConfig
from slipstream.errors import InputError, ServerError, StageFailed
from slipstream.features import reference, servers
from slipstream.features.lease import Lease
from slipstream.features.recapture import recapture
from slipstream.features.recipe import POST_NORM, store_dtype
from slipstream.features.sample import BadSample, Form
from slipstream.imports import convention
from slipstream.imports.final_state import AFTER, BEFORE, Seen, look
from slipstream.imports.found import CONVENTIONS, Sample, Store
from slipstream.imports.matched import Match, agreed, match
from slipstream.imports.survey import Survey
from slipstream.verifier_ends import Head, Unreadable, read_head

SAMPLES = 3  # looked at; more show nothing new


@dataclass(frozen=True)
class Said:
    """What is said about the layers, by the user or the store; `where` names who says it.

    `probe` off starts no server.
    """

    layer_ids: list[int] | None = None
    convention: str | None = None
    final_state: str | None = None
    probe: bool = True
    where: str = "--layer-ids"

    def completed(self, store: Store, layers: int) -> Said:
        """With what the store says where the user says nothing."""
        stated = store.stated
        final = None
        if stated.final_state is not None:
            final = AFTER if stated.final_state == POST_NORM else BEFORE
        whole = replace(
            self,
            layer_ids=self.layer_ids or stated.layer_ids,
            convention=self.convention or (stated.convention if self.layer_ids is None else None),
            final_state=self.final_state or final,
            where="--layer-ids" if self.layer_ids else stated.where or str(store.folder),
        )
        if whole.layer_ids is not None and whole.convention is not None:
            convention.refuse_unknown(whole.where, whole.layer_ids, whole.convention, layers)
        return whole


@dataclass(frozen=True)
class Measured:
    """What came out: the positions to take, their ids (vLLM's), where the final norm stands, and how that is known."""

    positions: list[int]
    layer_ids: list[int]
    convention: str
    final_state: str
    by: str
    figures: dict[str, Any]

    def recorded(self) -> dict[str, Any]:
        """For the manifest."""
        return {"convention": self.convention, "measured_by": self.by, "measured": self.figures}


def measure(workdir: Path, config: RunConfig, store: Store, survey: Survey, said: Said, wanted: list[int]) -> Measured:
    """Finds the positions of the states `wanted` (vLLM's ids, the final one last).

    Raises InputError when what is said and what is measured differ, or when the last state is not the final one.
    """
    chosen = _chosen(store, survey)
    head = _head(config)
    if said.probe:
        with _served(workdir, config, wanted) as (lease, ids):
            found = _matches(config, store, chosen, lease, ids, wanted[-1], head)
        return _by_server(store, said, wanted, found, head, chosen)
    return _by_text(store, said, wanted, head, chosen)


def _chosen(store: Store, survey: Survey) -> list[Sample]:
    """The samples to look at: the sound ones with the smallest keys, so the same in every run."""
    sound = (row.sample for row in survey.usable(order="key") if _sound(store, row.sample))
    chosen = list(islice(sound, SAMPLES))
    if not chosen:
        raise StageFailed(f"{store.folder}: the states of every sample are unreadable, not finite or zeros")
    return chosen


def _sound(store: Store, sample: Sample) -> bool:
    """Whether a sample's states can be compared; what is wrong with one is told when it is taken."""
    try:
        values = store.states(sample).values()
    except BadSample:
        return False
    return bool(values.isfinite().all() and values.any(-1).all())


def _head(config: RunConfig) -> Head | Unreadable:
    try:
        return read_head(verifier.folder_of(config.verifier))
    except Unreadable as reason:
        return reason


@contextmanager
def _served(workdir: Path, config: RunConfig, wanted: list[int]) -> Iterator[tuple[Lease, list[int]]]:
    """A server and the ids that it captures: a running one's, or all but the embedding."""
    named = config.servers.features_endpoints
    if named:
        storage = Path(str(config.servers.features_storage))
        servers.check_storage(storage)
        yield Lease(serving.connect(named[0]), storage), wanted
        return
    serving.require_environment(config.servers)
    with reference.serve(workdir, config) as lease:
        yield lease, list(range(1, wanted[-1] + 1))


def _matches(
    config: RunConfig,
    store: Store,
    chosen: list[Sample],
    lease: Lease,
    ids: list[int],
    final: int,
    head: Head | Unreadable,
) -> list[Match]:
    """What each position is, agreed on by all chosen samples.

    Only the beginning of a sample is captured: what follows cannot change it, and all layers take much room a token.
    """
    shape = verifier.load_shape(config.verifier)
    dtype = store_dtype(config) if config.servers.features_endpoints else config.verifier.dtype
    form = Form(len(ids), shape.hidden_size, dtype)
    found = []
    for sample in chosen:
        states = store.states(sample).values()[: reference.LONGEST]
        tokens = sample.token_ids[: reference.LONGEST].tolist()
        try:
            again = recapture(lease, tokens, form, config.features.request_timeout_s)
        except BadSample as error:
            raise ServerError(
                f"{lease.endpoint.url}: what it captures of the tokens of {sample.name} is no sample of {len(ids)} "
                f"layers in {dtype}: {error}; see whether it was started for this verifier and features.store"
            ) from error
        usable = head if isinstance(head, Head) else None
        found.append(match(states, again.states, ids, final, usable))
    return agreed(str(store.folder), found, ids)


def _by_server(
    store: Store, said: Said, wanted: list[int], found: list[Match], head: Head | Unreadable, chosen: list[Sample]
) -> Measured:
    measured = [one.layer_id for one in found]
    final_state = found[-1].final_state
    name = said.convention or _convention(said, measured)
    _refuse_final_state(store, said, final_state)
    if said.layer_ids is not None:
        claimed = convention.translate(said.layer_ids, name)
        if claimed != measured:
            at = next(i for i, (a, b) in enumerate(zip(claimed, measured, strict=True)) if a != b)
            raise InputError(
                f"{said.where}: under the convention {name!r} ({convention.MEANING[name]}) position {at} is id "
                f"{claimed[at]}, but its states are those of id {measured[at]} ({found[at].distance:.2%} from it): a "
                "store "
                f"made under another convention{_other(said, measured, name)}"
            )
    positions = convention.positions(said.where, convention.back(measured, name), name, wanted)
    if odd := [i for i in positions[:-1] if found[i].final_state == AFTER]:
        raise InputError(
            f"{store.folder}: position {odd[0]} holds the final state after the final norm, not an auxiliary one"
        )
    figures: dict[str, Any] = {"layer_ids": measured, "distances": [round(one.distance, 6) for one in found]}
    figures["next_distances"] = [round(one.next_distance, 6) for one in found]
    return Measured(positions, wanted, name, final_state, "server", figures)


def _convention(said: Said, measured: list[int]) -> str:
    """The convention under which what is said is what was measured; vLLM's when neither is or nothing is said."""
    for name in CONVENTIONS:
        if said.layer_ids is not None and convention.translate(said.layer_ids, name) == measured:
            return name
    return CONVENTIONS[0]


def _other(said: Said, measured: list[int], name: str) -> str:
    for other in CONVENTIONS:
        if other != name and convention.translate(said.layer_ids or [], other) == measured:
            return f"; say --convention {other}"
    return f"; its layers are {measured} in vLLM's ids"


def _by_text(store: Store, said: Said, wanted: list[int], head: Head | Unreadable, chosen: list[Sample]) -> Measured:
    if said.layer_ids is None:
        raise InputError(
            f"{store.folder}: does not say which layers it holds and no server may be asked; say --layer-ids and "
            "--convention, or leave out --no-probe"
        )
    if said.convention is None:
        raise InputError(
            f"{said.where}: layer ids {said.layer_ids} without a convention; without a server it cannot be measured: "
            "say "
            f"--convention {CONVENTIONS[0]} (id k is {convention.MEANING[CONVENTIONS[0]]}) or --convention "
            f"{CONVENTIONS[1]} (id k is {convention.MEANING[CONVENTIONS[1]]}, as in speculators' v1 form), or leave "
            "out --no-probe"
        )
    positions = convention.positions(said.where, said.layer_ids, said.convention, wanted)
    if isinstance(head, Unreadable):
        raise InputError(
            f"{store.folder}: its last state cannot be checked without a server: {head}; leave out --no-probe"
        )
    seen = look(head, [_looked_at(store, sample) for sample in chosen])
    _refuse_final_state(store, said, seen.final_state)
    if not seen.own_text:
        raise InputError(_not_own(store, said, seen, wanted))
    figures = {
        "tokens": seen.tokens,
        "likelihood": round(seen.last.likelihood, 4),
        "entropy": round(seen.last.entropy, 4),
    }
    figures["argmax"] = round(seen.last.hits, 4)
    return Measured(positions, wanted, said.convention, seen.final_state, "own text", figures)


def _looked_at(store: Store, sample: Sample) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, mask = (torch.from_numpy(values.copy()) for values in (sample.token_ids, sample.loss_mask))
    return store.states(sample).values(), tokens, mask


def _refuse_final_state(store: Store, said: Said, measured: str) -> None:
    if said.final_state not in (None, measured):
        raise InputError(
            f"{store.folder}: said to hold the final state {said.final_state} the final norm, but its values are those "
            f"{measured} it; leave --final-state out or say --final-state {measured}"
        )


def _not_own(store: Store, said: Said, seen: Seen, wanted: list[int]) -> str:
    better = min(range(len(seen.surprises)), key=lambda i: seen.surprises[i].likelihood)
    last = len(seen.surprises) - 1
    where = f"{store.folder}: the last state finds its rows' own tokens {seen.last}"
    if better != last:
        return (
            f"{where}, position {better} finds them {seen.surprises[better].likelihood:.2f}: the last one is not the "
            "final "
            f"state; capture the store again with layer ids {wanted}"
        )
    return (
        f"{where}: it is not the final state, id {wanted[-1]} (the input of the last layer is id {wanted[-1] - 1}), or "
        "another model wrote the text; leave out --no-probe so that a server tells, or capture the store again with "
        "layer "
        f"ids {wanted}"
    )
