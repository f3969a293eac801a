"""Which file of a checkpoint folder holds which tensor: an index and its shards, or safetensors files of any name."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

OTHERS = {"*.gguf": "GGUF", "*.bin": "pickled PyTorch files", "*.pth": "pickled PyTorch files"}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Unreadable(Exception):
    """Why the verifier's head or embedding cannot be used; the text completes "not probed: …"."""


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor; raises Unreadable.

    With an index its map counts, whatever else lies there (Mistral's repositories have the weights twice); without one
    `model.safetensors` alone, else every safetensors file.
    """
    indexes = [folder / INDEX] if (folder / INDEX).is_file() else sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise Unreadable(f"there are several indexes ({', '.join(path.name for path in indexes)}); keep one")
    try:
        return _indexed(indexes[0]) if indexes else _listed(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise Unreadable(f"the weights cannot be read ({error})") from error


def _indexed(index: Path) -> dict[str, Path]:
    named: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    for file in sorted(set(named.values())):
        if Path(file).name != file:
            raise Unreadable(f"{index.name} names {file}, which lies outside its folder")
    return {name: index.parent / file for name, file in named.items()}


def _listed(folder: Path) -> dict[str, Path]:
    paths = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        for pattern, form in OTHERS.items():
            if found := sorted(folder.glob(pattern)):
                raise Unreadable(f"the weights are {form} ({found[0].name}), not safetensors")
        raise Unreadable("there is no .safetensors file")
    found_in: dict[str, Path] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in set(file.keys()):
                if name in found_in:
                    raise Unreadable(f"{name} lies in {found_in[name].name} and in {path.name}; keep one")
                found_in[name] = path
    return found_in
