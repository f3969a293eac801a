"""The prompt set: the first artifact of a run, in which mixture and splits are decided once.

`train.jsonl`, `validation.jsonl`, `held_out.jsonl`, each in key order, and `rejects.jsonl` with file, row, id and
reason.  Its `parts` name `traced` (train and validation) and `held_out` apart, so that another held-out prompt
costs nothing before acceptance.

Memory does not grow with the number of prompts: they are read, sorted and written one by one (see `gathered`).
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from slipstream import atomic
from slipstream.artifact import Artifact, claim, stage_key
from slipstream.config import PromptsConfig
from slipstream.digest import digest
from slipstream.encoding import decode
from slipstream.errors import InputError, StageFailed
from slipstream.traces.gathered import Gathered, Place, Tally, gathering
from slipstream.traces.mixture import mixture
from slipstream.traces.prompts import Prompt
from slipstream.traces.sources import Reject, source_digest
from slipstream.traces.splits import HELD_OUT, SPLITS, TRAIN, VALIDATION, Splitter

STAGE, VERSION = "prompts", 2
SOURCES = ("sources", "held_out_sources")
REJECTS = "rejects.jsonl"


def _recipe(config: PromptsConfig) -> dict[str, Any]:
    return config.recipe() | {kind: [source.recipe() for source in getattr(config, kind)] for kind in SOURCES}


def _inputs(config: PromptsConfig) -> dict[str, str]:
    named = {f"{kind}.{i}": source for kind in SOURCES for i, source in enumerate(getattr(config, kind))}
    return {name: source_digest(source) for name, source in named.items()}


def key(config: PromptsConfig) -> str:
    """The folder key; raises InputError when a source cannot be read."""
    return stage_key(STAGE, VERSION, _recipe(config), _inputs(config))


def run(workdir: Path, config: PromptsConfig, on_wait: Callable[[str], None] | None = None) -> Artifact:
    """Reads, checks, mixes and splits the prompts.

    Raises InputError for a source that cannot be read and for too few prompts, StageFailed when too many rows are
    bad or a source of the mixture has nothing usable.
    """
    inputs = _inputs(config)
    recipe = _recipe(config)
    name = stage_key(STAGE, VERSION, recipe, inputs)
    with claim(workdir, STAGE, name, on_wait) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        database = folder.path / f".gathered.{os.getpid()}{atomic.SUFFIX}"
        with gathering(database, config.split_seed) as gathered:
            tallies, apart = _read(folder.path / REJECTS, config, gathered)
            gathered.set_apart()
            usable = [gathered.usable(index) for index in range(len(config.sources))]
            shares = _shares(config, usable)
            written = _write(folder.path, config, gathered, shares)
        parts = {
            "traced": digest([written.digest(TRAIN), written.digest(VALIDATION)]),
            "held_out": written.digest(HELD_OUT),
        }
        return folder.commit(
            version=VERSION,
            recipe=recipe,
            inputs=inputs,
            content=digest(parts),
            parts=parts,
            files=[*(f"{split}.jsonl" for split in SPLITS), REJECTS],
            counts={
                **written.sizes,
                "rejected": sum(tally.rejected for tally in [*tallies, *apart]),
                "repeated": sum(tally.repeated for tally in tallies),
                "left_out": sum(usable) - sum(written.used),
                "sources": {
                    str(index): {
                        "usable": usable[index],
                        "used": written.used[index],
                        "rejected": tally.rejected,
                        "repeated": tally.repeated,
                    }
                    for index, tally in enumerate(tallies)
                },
            },
        )


def _read(path: Path, config: PromptsConfig, gathered: Gathered) -> tuple[list[Tally], list[Tally]]:
    """Reads all sources and writes the rejects; tallies of `sources` and of `held_out_sources`."""
    first: list[Reject] = []
    with atomic.replacing(path) as temporary, temporary.open("w", encoding="ascii") as file:

        def reject(row: Reject) -> None:
            file.write(json.dumps(asdict(row)) + "\n")
            if not first:
                first.append(row)

        tallies = gathered.read(config.sources, False, reject)
        apart = gathered.read(config.held_out_sources, True, reject)
    rows = sum(tally.rows for tally in [*tallies, *apart])
    rejected = sum(tally.rejected for tally in [*tallies, *apart])
    if not any(tally.new for tally in tallies):
        named = ", ".join(source.path for source in config.sources)
        raise StageFailed(f"{named}: no usable prompt among {rows} rows")
    if rejected > config.max_rejected_share * rows:
        raise StageFailed(
            f"{first[0].file}: {rejected} of {rows} rows are unusable, more than max_rejected_share "
            f"{config.max_rejected_share:g}; the first is row {first[0].row} ({first[0].reason}), all are in {path}"
        )
    return tallies, apart


def _shares(config: PromptsConfig, usable: list[int]) -> list[int]:
    """How many prompts of each source to use, or of all together when nothing fixes their proportions."""
    weights = [source.weight for source in config.sources]
    shares = mixture(usable, weights, config.limit)
    if weights[0] is None:
        return [sum(shares)]
    if 0 in usable:
        empty = config.sources[usable.index(0)].path
        raise StageFailed(f"{empty}: no usable prompt, so nothing can be mixed with it; add prompts or take it out")
    return shares


@dataclass
class Written:
    """What was written: prompts and hash of their keys by split, prompts by source."""

    used: list[int]
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    hashes: dict[str, Any] = field(default_factory=lambda: {split: hashlib.sha256() for split in SPLITS})

    def add(self, split: str, place: Place) -> None:
        """Counts a prompt."""
        self.sizes[split] += 1
        self.hashes[split].update(f"{place.key} {place.kind}\n".encode())
        if not place.held_out:
            self.used[place.source] += 1

    def digest(self, split: str) -> str:
        """32 hex digits that name a split: its prompts' keys and domains in order."""
        return str(self.hashes[split].hexdigest()[:32])


def _write(folder: Path, config: PromptsConfig, gathered: Gathered, shares: list[int]) -> Written:
    """Writes the splits: the chosen prompts of `sources` by position, those of `held_out_sources` as they are."""
    positions = (place.position for place in gathered.first(shares))
    splitter = Splitter(positions, config.held_out_ratio, config.val_ratio)
    sizes = splitter.sizes | {HELD_OUT: splitter.sizes[HELD_OUT] + gathered.apart()}
    if empty := [split for split in SPLITS if not sizes[split]]:
        where = config.sources[0].path
        raise InputError(f"{where}: {sum(shares)} prompts are too few, the split {empty[0]} stays empty")
    written = Written([0] * len(config.sources))
    every = heapq.merge(gathered.first(shares), islice(gathered.held_out(), config.limit), key=lambda place: place.key)
    with ExitStack() as stack:
        files = {}
        for split in SPLITS:
            temporary = stack.enter_context(atomic.replacing(folder / f"{split}.jsonl"))
            files[split] = stack.enter_context(temporary.open("w", encoding="ascii"))
        for place in every:
            split = HELD_OUT if place.held_out else splitter.place(place.position)
            files[split].write(gathered.line(place) + "\n")
            written.add(split, place)
    return written


def load(artifact: Artifact, split: str, longer_than: int = 0) -> Iterator[Prompt]:
    """The prompts of one split, in key order; only those whose whole record has more than `longer_than` bytes."""
    with (artifact.folder / f"{split}.jsonl").open("rb") as file:
        for line in file:
            if len(line) > longer_than:
                yield Prompt.from_json(decode(line))


def count(artifact: Artifact, split: str) -> int:
    """How many prompts `load` gives."""
    return int(artifact.manifest().counts[split])
