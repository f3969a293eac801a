"""Whose tokens a traces artifact holds: compared wherever its rows meet a verifier.

The manifest's `origin`: `verifier` and `tokenizer` (digests, `verifier.identity` and `verifier.tokenizer_identity`),
`verifier_name` (the folder's name), and for rows taken from a store `store` and `final_state`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream import verifier
from slipstream.artifact import Artifact, open_artifact
from slipstream.config import RunConfig, VerifierConfig
from slipstream.errors import Damaged, InputError
from slipstream.traces import table


def origin(config: VerifierConfig) -> dict[str, Any]:
    """What the manifest keeps about the verifier that wrote the rows."""
    return {
        "verifier": verifier.identity(config),
        "verifier_name": Path(config.path).resolve().name,
        "tokenizer": verifier.tokenizer_identity(config),
    }


def check(config: RunConfig, traces: Artifact) -> None:
    """Raises InputError unless the rows were made with the configuration's verifier and tokenizer.

    Manifests of before `origin` hold the verifier's digest in their recipe; what is not known is not compared.
    """
    manifest = traces.manifest()
    known = {"verifier": manifest.recipe.get("verifier"), **manifest.origin}
    here = origin(config.verifier)
    for what in ("tokenizer", "verifier"):
        if known.get(what) not in (None, here[what]):
            name = known.get("verifier_name", "unknown")
            raise InputError(
                f"{traces.path}: these traces are of another {what} ({name}, digest {known[what]}) than verifier.path "
                f"{config.verifier.path} ({here['verifier_name']}, digest {here[what]}); name that verifier, or make "
                "the traces with this one"
            )


def open_traces(config: RunConfig, folder: Path) -> Artifact:
    """The traces artifact in `folder`.

    Raises InputError when it is none, is not intact, or is of another verifier or tokenizer than the configuration's.
    """
    try:
        traces = open_artifact(folder.resolve())
    except Damaged as error:
        raise InputError(str(error)) from error
    if table.FILE not in traces.manifest().files:
        raise InputError(f"{folder}: an artifact of stage {traces.stage}, not traces: it lists no {table.FILE}")
    if damage := traces.verify():
        raise InputError(
            f"{folder}: {damage[0].path} is {damage[0].reason}; run the traces stage, or the import, again to repair it"
        )
    check(config, traces)
    return traces


def imported(config: RunConfig) -> Artifact:
    """The traces that `traces.imported` names; raises InputError as `open_traces` does."""
    try:
        return open_traces(config, Path(str(config.traces.imported)))
    except InputError as error:
        raise InputError(f"traces.imported: {error}") from error
