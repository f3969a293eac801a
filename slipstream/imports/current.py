"""Today's form: a `datasets` directory (`input_ids`, `loss_mask`) and `hidden_states/hs_<row>.safetensors`.

What later versions of speculators write and train on, and what our features stage makes.  Files in the verifier's
type or, by hs-connectors, in float8 with a scale a token.  Only a store of ours says which layers it holds
(manifest.json).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.artifact import MANIFEST, Manifest, checksum, read_manifest
from slipstream.errors import Damaged, InputError
from slipstream.features.recipe import CONVENTION
from slipstream.features.sample import CODES, SCALES, BadSample
from slipstream.features.store import HIDDEN_STATES
from slipstream.features.store import STAGE as FEATURES
from slipstream.imports.found import VLLM, Bad, Sample, Stated, States, Store, sample_of

NAMES = {kind.safetensors: name for name, kind in CODES.items()}
DATASET = ("state.json", "dataset_info.json")


def open_store(folder: Path) -> Store:
    """The store in `folder`; raises InputError when its data set cannot be read or is not what its manifest says."""
    import datasets

    manifest = _manifest(folder)
    try:
        rows = datasets.load_from_disk(str(folder))
        rows = rows.select_columns(["input_ids", "loss_mask"]).with_format("numpy")
    except Exception as error:
        raise InputError(f"{folder}: its data set cannot be read ({type(error).__name__}: {error})") from error
    return Store(
        folder=folder,
        form="today's form",
        count=len(rows),
        stated=Stated() if manifest is None else _stated(folder, manifest),
        survey=partial(_survey, folder, rows),
        states=partial(_states, folder),
        file=lambda sample: folder / sample.name,
        checksums={} if manifest is None else {name: record.checksum for name, record in manifest.files.items()},
    )


def _manifest(folder: Path) -> Manifest | None:
    """Of a store of ours, whose rows are intact; None for others.  The samples are compared when they are taken."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        manifest = read_manifest(folder)
    except Damaged as error:
        raise InputError(str(error)) from error
    if manifest.stage != FEATURES:
        raise InputError(f"{folder}: an artifact of stage {manifest.stage}, only {FEATURES} holds hidden states")
    rows = [name for name in manifest.files if not name.startswith(HIDDEN_STATES) and (folder / name).is_file()]
    for name in rows:
        found, wanted = checksum(folder / name), manifest.files[name].checksum
        if found != wanted:
            raise InputError(
                f"{folder / name}: checksum {found} instead of {wanted} in {MANIFEST}: the rows are not those of this "
                "store; take an intact copy"
            )
    return manifest


def _stated(folder: Path, manifest: Manifest) -> Stated:
    made = manifest.recipe
    return Stated(
        where=str(folder / MANIFEST),
        layer_ids=made.get("layer_ids"),
        convention=VLLM if made.get("convention") == CONVENTION else None,
        final_state=made.get("final_state"),
        hidden_size=made.get("hidden_size"),
        identity=made.get("verifier"),
    )


def _survey(folder: Path, rows: Any) -> Iterator[Sample | Bad]:
    for number, row in enumerate(rows):
        name = f"{HIDDEN_STATES}/hs_{number}.safetensors"
        try:
            yield _sample(folder / name, name, number, row)
        except BadSample as error:
            yield Bad(name, number, str(error))


def _sample(path: Path, name: str, number: int, row: dict[str, Any]) -> Sample:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="np") as file:
            tokens = file.get_tensor("token_ids")
            states = file.get_slice("hidden_states")
            shape, code = tuple(states.get_shape()), states.get_dtype()
    except FileNotFoundError:
        raise BadSample("missing") from None
    except Exception as error:
        raise BadSample(f"not a hidden-state file ({type(error).__name__}: {error})") from error
    if not np.array_equal(tokens, row["input_ids"]):
        raise BadSample(f"holds {len(tokens)} other tokens than row {number} of the data set")
    return sample_of(name, number, row["input_ids"], row["loss_mask"], shape, NAMES.get(code, code))


def _states(folder: Path, sample: Sample) -> States:
    from safetensors import safe_open

    try:
        with safe_open(folder / sample.name, framework="pt") as file:
            scales = file.get_tensor(SCALES) if SCALES in file.keys() else None  # noqa: SIM118 - no mapping
            return States(file.get_tensor("hidden_states"), scales)
    except Exception as error:
        raise BadSample(f"not a hidden-state file ({type(error).__name__}: {error})") from error
