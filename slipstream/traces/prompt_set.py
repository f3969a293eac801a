"""The prompt set: the first artifact of a run, in which the three splits are decided once.

Its `parts` name `traced` (train and validation) and `held_out` apart, so that another held-out prompt
costs nothing before acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream import atomic
from slipstream.artifact import Artifact, claim, stage_key
from slipstream.config import PromptsConfig
from slipstream.digest import digest
from slipstream.errors import InputError, StageFailed
from slipstream.traces import prompts, splits
from slipstream.traces.prompts import Prompt

STAGE, VERSION = "prompts", 1
PATHS = ("sources", "held_out_sources")


def _recipe(config: PromptsConfig) -> dict[str, object]:
    return {name: value for name, value in config.recipe().items() if name not in PATHS}


def _inputs(config: PromptsConfig) -> dict[str, str]:
    named = {f"{kind}.{i}": path for kind in PATHS for i, path in enumerate(getattr(config, kind))}
    return {name: prompts.source_digest(path) for name, path in named.items()}


def key(config: PromptsConfig) -> str:
    """The folder key; raises InputError when a source cannot be read."""
    return stage_key(STAGE, VERSION, _recipe(config), _inputs(config))


def run(workdir: Path, config: PromptsConfig, on_wait: Callable[[str], None] | None = None) -> Artifact:
    """Reads, checks and splits the prompts.

    Raises InputError for a source that cannot be read, StageFailed when too many rows are bad.
    """
    inputs = _inputs(config)
    recipe = _recipe(config)
    name = stage_key(STAGE, VERSION, recipe, inputs)
    with claim(workdir, STAGE, name, on_wait) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        found, rejects, repeated = prompts.read(config.sources)
        extra, more_rejects, _ = prompts.read(config.held_out_sources)
        rejects += more_rejects
        rows = len(found) + len(extra) + repeated + len(rejects)
        if not found:
            raise StageFailed(f"{', '.join(config.sources)}: no usable prompt among {rows} rows")
        if len(rejects) > config.max_rejected_share * rows:
            first = rejects[0]
            raise StageFailed(
                f"{first.file}: {len(rejects)} of {rows} rows are unusable, more than max_rejected_share "
                f"{config.max_rejected_share:g}; the first is row {first.row} ({first.reason})"
            )
        apart = {prompt.content_key for prompt in extra}
        seen = [prompt for prompt in found if prompt.content_key not in apart]
        chosen = splits.split(seen[: config.limit], config.held_out_ratio, config.val_ratio, config.split_seed)
        chosen[splits.HELD_OUT] += extra[: config.limit]
        if empty := [part for part in splits.SPLITS if not chosen[part]]:
            raise InputError(f"{config.sources[0]}: {len(found)} prompts are too few, the split {empty[0]} stays empty")
        files = []
        for part in splits.SPLITS:
            _write(folder.path / f"{part}.jsonl", [prompt.to_json() for prompt in chosen[part]])
            files.append(f"{part}.jsonl")
        _write(folder.path / "rejects.jsonl", [reject.__dict__ for reject in rejects])
        keys = {part: [prompt.key for prompt in chosen[part]] for part in splits.SPLITS}
        parts = {
            "traced": digest([keys[splits.TRAIN], keys[splits.VALIDATION]]),
            "held_out": digest(keys[splits.HELD_OUT]),
        }
        counts = {part: len(chosen[part]) for part in splits.SPLITS}
        return folder.commit(
            version=VERSION,
            recipe=recipe,
            inputs=inputs,
            content=digest(parts),
            parts=parts,
            files=[*files, "rejects.jsonl"],
            counts={**counts, "rejected": len(rejects), "repeated": repeated},
        )


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)
    atomic.write_bytes(path, text.encode())


def load(artifact: Artifact, split: str) -> Iterator[Prompt]:
    """The prompts of one split, in key order."""
    with (artifact.folder / f"{split}.jsonl").open(encoding="utf-8") as file:
        for line in file:
            yield Prompt.from_json(json.loads(line))
