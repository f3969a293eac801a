"""The imported rows as a traces artifact: what the later stages read instead of the verifier's fresh answers.

Columns as in `traces.table`; `key` is the digest of the tokens, `turn` counts rows of the same tokens with different
masks, `prompt_tokens` is the index of the first supervised token, the mask is the store's own, unshifted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import atomic, verifier
from slipstream.artifact import Artifact, claim, stage_key
from slipstream.config import RunConfig
from slipstream.errors import InputError
from slipstream.imports.found import Store
from slipstream.imports.survey import HARMLESS, Row, Survey
from slipstream.traces import origin, samples, table
from slipstream.traces.rules import Rules
from slipstream.traces.selection import REJECTS
from slipstream.traces.splits import Splitter
from slipstream.traces.stage import FILES, STAGE, TRACED, VERSION, show
from slipstream.traces.summary import Summary
from slipstream.traces.trace import IMPORTED, Trace

KIND = "imported"


def write(
    workdir: Path,
    config: RunConfig,
    store: Store,
    survey: Survey,
    final_state: str,
    measured: dict[str, Any],
    on_wait: Callable[[str], None] | None = None,
) -> Artifact:
    """Writes the usable samples of the survey; `measured` is kept in the manifest.  Raises InputError for too few."""
    splitter = Splitter(survey.places(), 0.0, config.prompts.val_ratio)
    if empty := [split for split in TRACED if not splitter.sizes[split]]:
        raise InputError(
            f"{store.folder}: {survey.count()} usable samples are too few, the split {empty[0]} stays empty"
        )
    made = {
        "imported": True,
        "verifier": verifier.identity(config.verifier),
        "val_ratio": config.prompts.val_ratio,
        "split_seed": config.prompts.split_seed,
        "final_state": final_state,
    }
    inputs = {"store": _digest(survey)}
    name = stage_key(STAGE, VERSION, made, inputs)
    with claim(workdir, STAGE, name, on_wait) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        selection = _Selection(Rules.of(config))
        with table.writing(folder.path) as rows:
            for split in TRACED:
                selection.add_all(split, survey, splitter, rows)
        rejects = survey.rejects()
        for _, reason in rejects:
            selection.summary.reject(KIND, reason)
        listed = [{"file": str(store.folder / name), "reason": reason} for name, reason in rejects]
        atomic.write_lines(folder.path / REJECTS, listed)
        figures = {**selection.summary.figures(), "splits": selection.sizes, "execution": None}
        show(folder.path, config, figures, selection.samples, selection.rules)
        total = selection.summary.total
        return folder.commit(
            version=VERSION,
            recipe=made,
            inputs=inputs,
            content=selection.content(),
            files=FILES,
            counts={
                **selection.sizes,
                "rejected": sum(reason not in HARMLESS for _, reason in rejects),
                "left_out": sum(reason in HARMLESS for _, reason in rejects),
                "tokens": total.prompt_tokens + total.output_tokens,
                "supervised_tokens": selection.supervised,
            },
            work={"requested": 0, "reused": total.rows},
            origin={
                **origin.origin(config.verifier),
                "store": str(store.folder),
                "final_state": final_state,
                **measured,
            },
        )


class _Selection:
    """What is counted while rows are written."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.summary, self.samples = Summary(), samples.Chooser()
        self.sizes = dict.fromkeys(TRACED, 0)
        self.supervised = 0
        self._hash = hashlib.sha256()
        self._last: tuple[str, int] = ("", 0)

    def add_all(self, split: str, survey: Survey, splitter: Splitter, rows: table.Writer) -> None:
        """Writes the rows of one split, in order of their keys."""
        for row in survey.usable(order="key"):
            turn = self._last[1] + 1 if self._last[0] == row.key else 0
            self._last = (row.key, turn)
            if splitter.place(row.place) == split:
                self._add(split, row, turn, rows)

    def _add(self, split: str, row: Row, turn: int, rows: table.Writer) -> None:
        tokens, mask = row.sample.token_ids, row.sample.loss_mask
        start = int(np.flatnonzero(mask)[0])
        ended = int(tokens[-1]) in self.rules.eos_ids
        trace = Trace(
            key=row.key,
            prompt_ids=tuple(tokens[:start].tolist()),
            output_ids=tuple(tokens[start:].tolist()),
            finish_reason="stop" if ended else "length",
            thinking=None,
            answer=None,
            turn=turn,
            ids=IMPORTED,
        )
        rows.add_masked(split, KIND, trace, trace.boundary(self.rules.think_close), mask)
        self.sizes[split] += 1
        self.supervised += int(mask.sum())
        self.summary.answer(trace)
        self.summary.accept(KIND, trace, self.rules.thinking_tokens(trace), turn == 0)
        self.samples.offer(split, KIND, trace)
        named = f"{split}:{row.key}:{start}:{hashlib.sha256(mask.tobytes()).hexdigest()}\n"
        self._hash.update(named.encode())

    def content(self) -> str:
        """Names the rows that later stages read: order, split, token ids, mask."""
        return self._hash.hexdigest()[:32]


def _digest(survey: Survey) -> str:
    """A digest of the usable rows: tokens and masks, in order of their keys."""
    hasher = hashlib.sha256()
    for row in survey.usable(order="key"):
        hasher.update(row.key.encode() + row.sample.loss_mask.tobytes())
    return hasher.hexdigest()[:32]
