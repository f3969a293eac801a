"""The verifier's two ends outside its layers: embedding rows, and final norm with output head, read from its folder.

They turn a stored final state into the verifier's next-token distribution, which a server can be asked for as well.
Nothing is loaded as a whole: a head of 163,840 x 7,168 is 2.3 GB, read through the file's mapping in blocks of rows.

Names are those of Hugging Face checkpoints under any prefix (`language_model.` for Kimi-K2.5); with several matches
the shortest is the model's own, the longer ones belong to its prediction layers (`layers.61.shared_head.norm`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.errors import InputError

INDEX = "model.safetensors.index.json"
NORM = ("model.norm.weight", "language_model.norm.weight", "norm.weight")
HEAD, EMBEDDING = ("lm_head.weight",), ("embed_tokens.weight",)
FLOATS = frozenset({"F32", "F16", "BF16"})
BLOCK_ROWS = 8192  # of the head, in float32 at once: 235 MB at width 7168
# Final norms that multiply by 1 + weight (transformers' Gemma and Qwen3.5 families).
ONE_PLUS = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "qwen3_next", "qwen3_5", "qwen3_5_text"}
)
SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class Unreadable(Exception):
    """Why the verifier's head or embedding cannot be used; the text completes "not probed: …"."""


@dataclass(frozen=True)
class Matrix:
    """A tensor [rows, columns] in a safetensors file, read in part."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` … `stop - 1` in float32."""
        with safe_open(self.path, framework="pt") as file:
            part: torch.Tensor = file.get_slice(self.name)[start:stop]
        return part.float()

    def take(self, rows: Sequence[int]) -> torch.Tensor:
        """The rows of these numbers, float32 [len(rows), columns]."""
        with safe_open(self.path, framework="pt") as file:
            part = file.get_slice(self.name)
            held = {row: part[row : row + 1] for row in set(rows)}
        return torch.cat([held[row] for row in rows]).float()


@dataclass(frozen=True)
class Head:
    """Final norm (RMS, `gain` float32 [hidden], `eps`) and output head [vocabulary, hidden]."""

    gain: torch.Tensor
    eps: float
    matrix: Matrix
    vocabulary: int

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """The final norm of float32 `states` [..., hidden]."""
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps) * self.gain

    def log_probabilities(self, states: torch.Tensor) -> torch.Tensor:
        """log_softmax of the head over `states` [n, hidden] that are normed already: float32 [n, vocabulary]."""
        blocks = range(0, self.vocabulary, BLOCK_ROWS)
        ends = [(start, min(start + BLOCK_ROWS, self.vocabulary)) for start in blocks]
        logits = torch.cat([states @ self.matrix.rows(start, stop).T for start, stop in ends], dim=-1)
        return torch.log_softmax(logits, dim=-1)


def read_head(folder: Path) -> Head:
    """Norm and head of the verifier in `folder`; raises Unreadable with the reason (quantised, scaled, missing)."""
    text, config = _text_config(folder)
    scaled = [name for name in SCALES if text.get(name) not in (None, 0, 1)]
    if scaled:
        raise Unreadable(f"the verifier's {scaled[0]} is {text[scaled[0]]}, which this probe does not apply")
    if "rms_norm_eps" not in text:
        raise Unreadable(f"{folder / 'config.json'} has no rms_norm_eps: the final norm is no RMS norm")
    files = _tensor_files(folder)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    matrix = _matrix(files, EMBEDDING if tied else HEAD + EMBEDDING)
    gain = _matrix(files, NORM)
    weight = gain.rows(0, gain.shape[0])
    hidden, vocabulary = text["hidden_size"], text["vocab_size"]
    if gain.shape != (hidden,) or matrix.shape[1:] != (hidden,) or matrix.shape[0] < vocabulary:
        raise Unreadable(
            f"{matrix.name} {list(matrix.shape)} and {gain.name} {list(gain.shape)} do not fit hidden_size {hidden} "
            f"and vocab_size {vocabulary}"
        )
    one_plus = {str(text.get("model_type")), str(config.get("model_type"))} & ONE_PLUS
    return Head(weight + 1 if one_plus else weight, float(text["rms_norm_eps"]), matrix, vocabulary)


def norm_eps(folder: Path) -> float | None:
    """The epsilon of the verifier's final RMS norm; None when its config has none."""
    text, _ = _text_config(folder)
    return float(text["rms_norm_eps"]) if "rms_norm_eps" in text else None


def read_embedding(folder: Path) -> Matrix:
    """The embedding rows [vocabulary, hidden]; raises Unreadable."""
    return _matrix(_tensor_files(folder), EMBEDDING)


def _text_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The language model's fields, and the whole of config.json."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    return config.get("text_config") or config, config


def _tensor_files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor."""
    try:
        if (folder / INDEX).is_file():
            named = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in named.items()}
        found: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path)
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise Unreadable(f"the weights in {folder} cannot be read ({error})") from error
    return found


def _matrix(files: Mapping[str, Path], names: Sequence[str]) -> Matrix:
    """The first of `names` that the checkpoint has, under any prefix."""
    for wanted in names:
        found = [name for name in files if name == wanted or name.endswith(f".{wanted}")]
        if found:
            name = min(found, key=len)
            try:
                with safe_open(files[name], framework="pt") as file:
                    part = file.get_slice(name)
                    dtype, shape = part.get_dtype(), tuple(part.get_shape())
            except (OSError, SafetensorError) as error:
                raise Unreadable(f"{files[name]} cannot be read ({error})") from error
            if dtype not in FLOATS:
                raise Unreadable(f"{name} is quantised ({dtype})")
            return Matrix(files[name], name, shape)
        stem = wanted.removesuffix("weight")
        if packed := [name for name in files if name.startswith(stem) or f".{stem}" in name]:
            raise Unreadable(f"{wanted} is quantised: the checkpoint has {min(packed, key=len)} in its place")
    raise Unreadable(f"the checkpoint has no {names[0]}")
