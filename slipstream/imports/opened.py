"""Which form a folder has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slipstream.errors import InputError
from slipstream.features.store import HIDDEN_STATES
from slipstream.imports import current, mappings, v1
from slipstream.imports.found import Store


def open_store(folder: Path) -> Store:
    """The store in `folder`; raises InputError when it is none."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name the one that holds data_<i>.pt or {HIDDEN_STATES}/")
    if files := v1.files(folder):
        store = v1.open_store(folder, files)
    elif all((folder / name).is_file() for name in current.DATASET) and (folder / HIDDEN_STATES).is_dir():
        store = current.open_store(folder)
    else:
        raise InputError(
            f"{folder}: no hidden-state store: neither data_<i>.pt files nor a saved data set with "
            f"{HIDDEN_STATES}/hs_<row>.safetensors{_below(folder)}"
        )
    if not store.count:
        raise InputError(f"{folder}: a store without a single sample")
    return replace(store, mappings=mappings.find(folder))


def _below(folder: Path) -> str:
    """The next thing to try, when it is easy to see."""
    inside = sorted(path.parent for path in folder.glob("*/data_*.pt")) + sorted(
        path.parent for path in folder.glob(f"*/{HIDDEN_STATES}")
    )
    return f"; did you mean {inside[0]}?" if inside else ""
