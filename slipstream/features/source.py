"""The traces that a capture starts from, named by their folder."""

from __future__ import annotations

from pathlib import Path

from slipstream import verifier
from slipstream.artifact import Artifact, open_artifact
from slipstream.config import RunConfig
from slipstream.errors import Damaged, InputError
from slipstream.traces import table


def open_traces(config: RunConfig, folder: Path) -> Artifact:
    """The traces artifact in `folder`.

    Raises InputError when it is none, is not intact, or was made with another verifier than the configuration's.
    """
    try:
        traces = open_artifact(folder.resolve())
    except Damaged as error:
        raise InputError(str(error)) from error
    manifest = traces.manifest()
    if table.FILE not in manifest.files:
        raise InputError(f"{folder}: an artifact of stage {traces.stage}, not traces: it lists no {table.FILE}")
    if damage := traces.verify():
        raise InputError(f"{folder}: {damage[0].path} is {damage[0].reason}; run the traces stage again to repair it")
    made_with, asked = manifest.recipe.get("verifier"), verifier.identity(config.verifier)
    if made_with is not None and made_with != asked:
        raise InputError(
            f"{folder}: traces of verifier {made_with}, but {config.verifier.path} is {asked}; their tokens mean "
            "nothing to it: name its own traces or the verifier that made these"
        )
    return traces
