"""Exports: the folders that servers load, made from a checkpoint.

epochs/<epoch>/
  flat/          `LlamaForCausalLMEagle3` for vLLM and SGLang (`flat`), with its model card
  speculators/   speculators' own form, for vLLM and to go on from, with its model card
  card.json      what the cards say (`card`)
  export.json    what all this was made from and how
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream import atomic, verifier
from slipstream.config import Dtype
from slipstream.drafter import card, checkpoints, engines, flat, opened
from slipstream.drafter.stage import ABOUT, CHECKPOINTS, CONFIG, EPOCHS, FLAT, WEIGHTS
from slipstream.errors import Damaged, InputError

SPECULATORS, RECORD, FACTS, CARD = "speculators", "export.json", "card.json", "README.md"


def export_epoch(folder: Path, name: str, dtype: Dtype, embeddings: bool = True) -> Path:
    """Makes `epochs/<name>/` from `checkpoints/<name>/` in a drafter's folder, whole or not at all, and returns it.

    Exports that are whole and made from this very checkpoint in this way stay as they are, so it may be called as often
    as one likes; they stay too when the checkpoint was dropped, and a flat form that was damaged since is made again
    from the speculators form.  Floats are written in `dtype`.
    Raises Damaged or InputError when a tensor, a map or a field of the checkpoint cannot be exported.
    """
    checkpoint, target = folder / CHECKPOINTS / name, folder / EPOCHS / name
    if (checkpoint / WEIGHTS).is_file():
        record = _record(checkpoint, dtype, embeddings)
        if not whole(target) or json.loads((target / RECORD).read_bytes()) != record:
            facts = {**_about(folder), "epoch": card.epoch_facts(checkpoint)}
            _make(checkpoint, target, record, facts, dtype, embeddings)
    elif not whole(target):
        if not opened.whole(target / SPECULATORS):
            raise Damaged(
                f"{target}: damaged, and its checkpoint was dropped (drafter.keep_checkpoints), so it cannot be made "
                f"again; remove {folder} to train this drafter anew"
            )
        facts = {**_about(folder), "epoch": card.epoch_facts(checkpoint)}
        _make(target / SPECULATORS, target, _record(target / SPECULATORS, dtype, embeddings), facts, dtype, embeddings)
    return target


def _record(checkpoint: Path, dtype: Dtype, embeddings: bool) -> dict[str, Any]:
    """What an export is made from: checkpoints are renamed into place, so size and time name one (10 GB to hash)."""
    weights = (checkpoint / WEIGHTS).stat()
    return {"checkpoint": [weights.st_size, weights.st_mtime_ns], "dtype": dtype, "embeddings": embeddings}


def _about(folder: Path) -> dict[str, Any]:
    """What the stage wrote for the cards of all its epochs; empty where it did not."""
    path = folder / ABOUT
    about: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return about


def whole(target: Path) -> bool:
    """Whether every file of an export can be read; files set aside as damaged are empty."""
    try:
        for name in (RECORD, FACTS):
            json.loads((target / name).read_bytes())
        cards = [(target / form / CARD).stat().st_size for form in (FLAT, SPECULATORS)]
    except (OSError, ValueError):
        return False
    return all(cards) and all(opened.whole(target / form) for form in (FLAT, SPECULATORS))


def _make(
    checkpoint: Path, target: Path, record: dict[str, Any], facts: dict[str, Any], dtype: Dtype, embeddings: bool
) -> None:
    temporary = target.parent / checkpoints.temporary_name(target.name)
    shutil.rmtree(temporary, ignore_errors=True)
    drafter = cast(opened.read(checkpoint), dtype)
    write(drafter, temporary / FLAT, "flat", dtype, embeddings, facts=facts)
    write(drafter, temporary / SPECULATORS, "speculators", dtype, facts=facts)  # to go on from: whole
    atomic.write_json(temporary / FACTS, facts)
    atomic.write_json(temporary / RECORD, record)
    checkpoints.publish(target.parent, target.name)


def cast(drafter: opened.Opened, dtype: Dtype) -> opened.Opened:
    """The drafter with its floats in `dtype`; maps stay."""
    tensors = {
        name: (tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in drafter.tensors.items()
    }
    return replace(drafter, tensors=tensors)


def write(
    drafter: opened.Opened,
    folder: Path,
    form: engines.Form,
    dtype: Dtype,
    embeddings: bool = True,
    engine: engines.Engine | None = None,
    facts: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> None:
    """Writes one form of a drafter, its floats being in `dtype` already, into the new folder `folder`.

    The card calls it `name`, or as the folder is called.
    Raises InputError for what the form, or the engine if one is named, does not hold.
    """
    require_auxiliary(drafter)
    if engine or form == "flat":  # what vLLM cannot load flat has no flat form
        engines.require(drafter.config, form, engine or "vllm", drafter.folder)
    if not embeddings:
        drafter = without_embedding(drafter)
    if form == "flat":
        config = flat.config(drafter.config, dtype, drafter.folder, sglang=engine == "sglang")
        tensors = flat.tensors(drafter.tensors)
    else:
        config, tensors = speculators_config(drafter, dtype), drafter.tensors
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    atomic.fsync_file(folder / WEIGHTS)
    atomic.write_json(folder / CONFIG, config)
    atomic.write_bytes(
        folder / CARD, card.render(drafter, form, {**(facts or {}), "engine": engine}, name or folder.name).encode()
    )
    atomic.fsync_folder(folder)


def without_embedding(drafter: opened.Opened) -> opened.Opened:
    """The drafter without its embedding; raises InputError where no server can share the verifier's."""
    hidden = drafter.config["transformer_layer_config"]["hidden_size"]
    width = drafter.config.get("target_hidden_size") or hidden
    if width != hidden:
        raise InputError(
            f"{drafter.folder}: not without its embedding: the drafter is {hidden} wide and the verifier's embedding "
            f"{width}"
        )
    kept = {name: tensor for name, tensor in drafter.tensors.items() if name != opened.EMBEDDING}
    return replace(drafter, tensors=kept)


def speculators_config(drafter: opened.Opened, dtype: Dtype) -> dict[str, Any]:
    """The `config.json` of the speculators form, without the code that speculators copies beside its checkpoints.

    Raises InputError when nothing says what the verifier is: vLLM reads no speculators config without it.
    """
    named = (drafter.config.get("speculators_config") or {}).get("verifier") or {}
    if not named.get("name_or_path"):
        raise InputError(f"{drafter.folder}: nothing says for which verifier this drafter is; name it with --verifier")
    return {name: value for name, value in drafter.config.items() if name != "auto_map"} | {"dtype": dtype}


def require_auxiliary(drafter: opened.Opened) -> None:
    """Raises InputError when an auxiliary id is no layer of the verifier, where the verifier's folder is here."""
    named = (drafter.config.get("speculators_config") or {}).get("verifier") or {}
    config = Path(named.get("name_or_path") or "") / CONFIG
    ids = drafter.aux_ids
    if sorted(set(ids)) != ids or ids[0] < 0:
        raise InputError(f"{drafter.folder}: auxiliary layer ids {ids} are not ascending, distinct and not negative")
    if config.is_file():
        shape = verifier.shape_of(json.loads(config.read_bytes()), str(config))
        if ids[-1] >= shape.num_layers:
            raise InputError(
                f"{drafter.folder}: auxiliary layer id {ids[-1]} of a verifier with {shape.num_layers} layers; they go "
                f"up to {shape.num_layers - 1}, and {shape.num_layers} is the final state, which is never auxiliary"
            )


def export(
    checkpoint: opened.Opened,
    output: Path,
    form: engines.Form,
    dtype: Dtype,
    embeddings: bool = True,
    engine: engines.Engine | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Writes one form of any checkpoint into the folder `output`, which must not be there, whole or not at all."""
    if output.exists():
        raise InputError(f"{output}: is there already; name a new folder")
    temporary = output.with_name(f".{output.name}{atomic.SUFFIX}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write(cast(checkpoint, dtype), temporary / output.name, form, dtype, embeddings, engine, facts)
        os.replace(temporary / output.name, output)
        atomic.fsync_folder(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
