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

STAGE = "traces"


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


def imported(config: RunConfig) -> Artifact:
    """The traces artifact that `traces.imported` names; raises InputError when it is none or of another verifier."""
    path = Path(str(config.traces.imported))
    try:
        traces = open_artifact(path)
    except Damaged as error:
        raise InputError(f"traces.imported: {error}; name the folder that `slipstream import` printed") from error
    if traces.stage != STAGE:
        raise InputError(f"traces.imported: {path} is an artifact of stage {traces.stage} instead of {STAGE}")
    if damage := traces.verify():
        raise InputError(f"traces.imported: {path}: {damage[0].path} is {damage[0].reason}; import the store again")
    check(config, traces)
    return traces
