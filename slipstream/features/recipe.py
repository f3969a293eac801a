"""What decides the states of a token sequence besides the sequence: the verifier, the layers, the type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream import verifier
from slipstream.config import RunConfig
from slipstream.digest import digest
from slipstream.errors import InputError
from slipstream.features.pool import FeaturePool, folder_of
from slipstream.features.sample import FP8, Form
from slipstream.traces import origin

CONVENTION = "id k is the residual stream before layer k; the last id is the final state, before the final norm"
PRE_NORM, POST_NORM = "before the final norm", "after the final norm"  # what a recipe's `final_state` can be


def store_dtype(config: RunConfig) -> str:
    """The type in which states lie in files: the verifier's, or float8 for the fp8 store."""
    return FP8 if config.features.store == "fp8" else config.verifier.dtype


def final_state(config: RunConfig) -> str:
    """PRE_NORM, as vLLM captures it, or what the store that the traces were imported from holds."""
    if not config.traces.imported:
        return PRE_NORM
    return str(origin.imported(config).manifest().origin.get("final_state", PRE_NORM))


def recipe(config: RunConfig) -> dict[str, Any]:
    """The recipe of this configuration's samples; its digest names their row pool."""
    return recipe_of(config, final_state(config))


def recipe_of(config: RunConfig, final: str) -> dict[str, Any]:
    """The recipe of samples whose final state is PRE_NORM or POST_NORM."""
    shape = verifier.load_shape(config.verifier)
    return {
        "verifier": verifier.identity(config.verifier),
        "computed": config.verifier.dtype,
        "dtype": store_dtype(config),
        "layer_ids": verifier.capture_ids(config.features.layer_ids, shape),
        "hidden_size": shape.hidden_size,
        "convention": CONVENTION,
        "final_state": final,
    }


def form(config: RunConfig) -> Form:
    """What every sample of this configuration looks like."""
    shape = verifier.load_shape(config.verifier)
    return Form(len(config.features.layer_ids) + 1, shape.hidden_size, store_dtype(config))


def open_pool(workdir: Path, config: RunConfig) -> FeaturePool:
    """The row pool of this configuration's recipe."""
    return pool_of(workdir, config, final_state(config))


def pool_folder(workdir: Path, config: RunConfig) -> Path:
    """Where that pool lies or will lie."""
    return folder_of(workdir, digest(recipe(config)))


def pool_of(workdir: Path, config: RunConfig, final: str) -> FeaturePool:
    """The row pool of samples whose final state is PRE_NORM or POST_NORM."""
    several_hosts = config.servers.runner == "ray"
    return FeaturePool(workdir, digest(recipe_of(config, final)), form(config), several_hosts)


def final_state_of(made: Mapping[str, Any], store: str) -> str:
    """PRE_NORM or POST_NORM, as the recipe of the store in folder `store` says; raises InputError for anything else."""
    flag = made.get("final_state")
    if flag not in (PRE_NORM, POST_NORM):
        raise InputError(
            f"{store}/manifest.json: final_state is {flag!r}, neither {PRE_NORM!r} nor {POST_NORM!r}, so nobody knows "
            "whether training must still apply the verifier's norm; import or capture the store again"
        )
    return str(flag)
