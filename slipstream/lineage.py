"""What an artifact was made from: the folders whose content its manifest names, back to the prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slipstream.artifact import Artifact, open_artifact
from slipstream.errors import Damaged


def lineage(artifact: Artifact) -> list[Artifact]:
    """The artifact's inputs and theirs, the oldest first, then the artifact itself.

    An input is the folder `<workdir>/<name of the input>/*` whose content, or a part of it, is what the manifest says;
    of several the newest.  Inputs that are no stage's folder, or are gone, are left out.
    """
    found: list[Artifact] = []
    for name, content in artifact.manifest().inputs.items():
        candidates = [a for a in _finished(artifact.folder.parent.parent / name) if content in _contents(a)]
        if candidates:
            newest = max(candidates, key=lambda candidate: candidate.manifest().ended)
            found += [step for step in lineage(newest) if step not in found]
    return [*found, artifact]


def _contents(artifact: Artifact) -> set[str]:
    return {artifact.content, *artifact.parts.values()}


def _finished(stage: Path) -> Iterator[Artifact]:
    for folder in sorted(stage.glob("*/")):
        try:
            yield open_artifact(folder)
        except Damaged:
            continue
