"""What a user means by a drafter: a run, its artifact, one epoch of it, an export, or any checkpoint folder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

from slipstream.artifact import MANIFEST, Artifact, open_artifact
from slipstream.config import Dtype
from slipstream.drafter import card, engines, opened
from slipstream.drafter.export import FACTS, SPECULATORS
from slipstream.drafter.stage import ABOUT, CHECKPOINTS, EPOCHS, STAGE, WEIGHTS
from slipstream.errors import Damaged, InputError
from slipstream.verifier import read_json

BEST = "best"


@dataclass(frozen=True)
class Source:
    """A folder with a drafter's config and weights, what is known of it, and the type its artifact exports in."""

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    dtype: Dtype | None = None


def find(what: str, epoch: str | None, root: Path) -> Source:
    """The drafter that `what` names: a folder, or a run in the work directory `root`; `epoch` a number or `best`.

    Raises InputError when there is none, or no such epoch; Damaged when files of the artifact are not as it lists them.
    """
    named = Path(what)
    path = (named if named.exists() else root / "runs" / what).resolve()
    if not path.is_dir():
        known = sorted(folder.name for folder in (root / "runs").glob("*") if folder.is_dir())
        raise InputError(f"{what}: neither a folder nor a run; known runs are {', '.join(known) or 'none'}")
    if (path / STAGE).is_dir():
        path = (path / STAGE).resolve()
    if path.parent.name == EPOCHS and epoch is None and (path.parents[1] / MANIFEST).exists():
        path, epoch = path.parents[1], path.name
    if (path / MANIFEST).exists():
        return _of_artifact(open_artifact(path), epoch or BEST)
    if epoch is not None:
        raise InputError(f"{what}: --epoch is for a run or a drafter's artifact, and this is neither")
    if path.parent == (root / "runs").resolve():
        raise InputError(f"{what}: this run has no drafter yet; wait for its training, or run its configuration again")
    if (path / SPECULATORS).is_dir():
        return Source(path / SPECULATORS, _facts(path))
    return Source(path, _facts(path.parent) or _of_checkpoint(path))


def _of_artifact(artifact: Artifact, epoch: str) -> Source:
    if artifact.stage != STAGE:
        raise InputError(f"{artifact.path}: an artifact of stage {artifact.stage}, and a drafter's is wanted")
    if damage := artifact.verify():
        raise Damaged(
            f"{artifact.folder / damage[0].path}: {damage[0].reason}; run the configuration again, only damaged files "
            "are made again"
        )
    manifest = artifact.manifest()
    best = str(manifest.counts["best_epoch"])
    name = best if epoch == BEST else epoch
    exported = artifact.folder / EPOCHS / name
    if not exported.is_dir():
        known = sorted(path.name for path in (artifact.folder / EPOCHS).iterdir())
        raise InputError(f"{artifact.path}: no epoch {name}; it has {', '.join(known)}")
    checkpoint = artifact.folder / CHECKPOINTS / name
    facts = _facts(exported)
    if name == best and (figures := served(artifact)) is not None:
        facts["served"] = figures
    return Source(
        checkpoint if (checkpoint / WEIGHTS).is_file() else exported / SPECULATORS,
        facts,
        manifest.recipe.get("export_dtype"),
    )


def served(drafter: Artifact) -> dict[str, Any] | None:
    """The figures of the newest acceptance measurement of this drafter in its work directory; None without one."""
    found: list[tuple[str, Path]] = []
    for folder in (drafter.folder.parent.parent / "acceptance").glob("*/"):
        try:
            manifest = open_artifact(folder).manifest()
        except Damaged:
            continue
        if manifest.inputs.get(STAGE) == drafter.content:
            found.append((manifest.ended, folder))
    return read_json(max(found)[1] / "acceptance.json") if found else None


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / FACTS
    return read_json(path) if path.exists() else {}


def _of_checkpoint(folder: Path) -> dict[str, Any]:
    """What lies beside a checkpoint of ours, finished artifact or not."""
    about = folder.parent.parent / ABOUT
    if folder.parent.name != CHECKPOINTS or not about.exists():
        return {}
    return {**read_json(about), "epoch": card.epoch_facts(folder)}


def dtype_of(source: Source, drafter: opened.Opened) -> Dtype:
    """The type to export in when nobody says one: the artifact's, else the weights' own."""
    name = str(drafter.tensors["fc.weight"].dtype).removeprefix("torch.")
    if source.dtype is None and name not in get_args(Dtype):
        raise InputError(f"{source.folder}: its weights are {name}; say --dtype ({', '.join(get_args(Dtype))})")
    return source.dtype or cast(Dtype, name)


def for_verifier(drafter: opened.Opened, name: str) -> opened.Opened:
    """The drafter with the verifier `name`: a model on the Hub, or a folder here, whose architecture is then known.

    Raises InputError for a folder that holds no model.
    """
    folder = Path(name)
    here = (folder / opened.CONFIG).exists()
    if not here and (folder.is_absolute() or folder.is_dir()):
        raise InputError(f"--verifier {name}: no {opened.CONFIG} there; name a model's folder, or the model on the Hub")
    known = read_json(folder / opened.CONFIG).get("architectures") if here else engines.architectures(drafter.config)
    speculators = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        **(drafter.config.get("speculators_config") or {}),
        "verifier": {"name_or_path": str(folder.absolute()) if here else name, "architectures": known or []},
    }
    return replace(drafter, config={**drafter.config, "speculators_config": speculators})


def called(drafter: opened.Opened, name: str) -> opened.Opened:
    """The drafter whose verifier is called `name`, whatever is there under that name; its architecture stays."""
    speculators = drafter.config["speculators_config"]
    named = {**speculators["verifier"], "name_or_path": name}
    return replace(drafter, config={**drafter.config, "speculators_config": {**speculators, "verifier": named}})
