"""The vocabulary stage: counts the supervised tokens of the traces, writes the maps and what they cover.

vocabulary/<key>/
  t2d.npy, d2t.npy   the maps (`mapping`): all that later stages read, and all that `content` names
  coverage.json      coverage on training and validation rows, for this vocabulary and for `vocabulary.sweep`
  coverage.png       the same as a picture
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import atomic, verifier
from slipstream.artifact import Artifact, checksum, claim, stage_key
from slipstream.config import RunConfig
from slipstream.digest import digest
from slipstream.traces import splits
from slipstream.traces import table as traces_table
from slipstream.vocabulary import kept, report
from slipstream.vocabulary.coverage import figures, supervised_counts
from slipstream.vocabulary.mapping import check, choose, mappings, ranking

STAGE, VERSION = "vocabulary", 2
MAPS = ("t2d.npy", "d2t.npy")


def _control(config: RunConfig, shape: verifier.Shape) -> dict[int, str]:
    """Texts of the control tokens and of `must_keep` by id."""
    special = verifier.special_tokens(verifier.folder_of(config.verifier))
    named = {token: text for text, token in special.items()}
    for token in (*shape.eos_token_ids, *config.vocabulary.must_keep):
        named.setdefault(token, f"token {token}")
    return named


def _recipe(config: RunConfig) -> dict[str, Any]:
    shape = verifier.load_shape(config.verifier)
    mapping: str | list[str] = config.vocabulary.mapping
    if mapping == "init_from":
        t2d, _ = kept.of_warm_start(config, shape.vocab_size)
        mapping = [mapping, digest(np.flatnonzero(t2d).tolist())]
    return {
        "mapping": mapping,
        "size": config.vocabulary.size,
        "forced": sorted(_control(config, shape)),
        "target_size": shape.vocab_size,
        "sweep": sorted({*config.vocabulary.sweep}),
    }


def key(config: RunConfig, traces: Artifact) -> str:
    """The folder key for these traces."""
    return stage_key(STAGE, VERSION, _recipe(config), {"traces": traces.content})


def run(workdir: Path, config: RunConfig, traces: Artifact, on_wait: Callable[[str], None] | None = None) -> Artifact:
    """Counts the supervised tokens and writes the maps: chosen by frequency, or those of `drafter.init_from`.

    Raises InputError when the size and the tokens that must be in do not go together, or the warm start's maps cannot
    be kept (`kept.of_warm_start`).
    """
    recipe, inputs = _recipe(config), {"traces": traces.content}
    name = stage_key(STAGE, VERSION, recipe, inputs)
    with claim(workdir, STAGE, name, on_wait) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        rows = traces_table.read(traces, ["split", "input_ids", "loss_mask"])
        counts = supervised_counts(rows, recipe["target_size"])
        if config.vocabulary.mapping == "init_from":
            t2d, d2t = kept.of_warm_start(config, recipe["target_size"])
        else:
            selected = choose(counts[splits.TRAIN], recipe["size"], recipe["forced"])
            t2d, d2t = mappings(selected, recipe["target_size"])
        check(t2d, d2t)
        for file, array in zip(MAPS, (t2d, d2t), strict=True):
            with atomic.replacing(folder.path / file) as temporary, temporary.open("wb") as out:
                np.save(out, array, allow_pickle=False)
        order = ranking(counts[splits.TRAIN], recipe["forced"])
        named = _control(config, verifier.load_shape(config.verifier))
        missing = [{"id": token, "text": named[token]} for token in recipe["forced"] if not t2d[token]]
        shown = {
            "mapping": config.vocabulary.mapping,
            "forced": len(recipe["forced"]),
            "control_tokens_missing": missing,
            **figures(counts, order, t2d, recipe["sweep"], len(recipe["forced"])),
        }
        atomic.write_json(folder.path / report.FIGURES, shown)
        atomic.write_bytes(folder.path / report.PICTURE, report.picture(shown))
        return folder.commit(
            version=VERSION,
            recipe=recipe,
            inputs=inputs,
            content=digest([checksum(folder.path / file) for file in MAPS]),
            files=[*MAPS, report.FIGURES, report.PICTURE],
            counts={
                "size": len(d2t),
                "target_size": len(t2d),
                "forced": len(recipe["forced"]),
                "control_tokens_missing": len(missing),
                "unseen": shown["unseen"],
                "coverage_train": shown["coverage"][splits.TRAIN],
                "coverage_validation": shown["coverage"][splits.VALIDATION],
            },
        )
