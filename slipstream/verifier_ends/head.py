"""The verifier's embedding and output head, and what lies between a final state and a logit.

logits = cap(multiplier * head(norm(state))), where most families have neither multiplier nor cap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.errors import InputError
from slipstream.text_fields import TextFields
from slipstream.verifier_ends import names
from slipstream.verifier_ends.files import Unreadable, tensor_files
from slipstream.verifier_ends.matrix import Matrix, read_matrix
from slipstream.verifier_ends.stored import FLOATS, Stored

# Families whose norms multiply by 1 + weight, by the language model's type (transformers' and vLLM's modelling code).
ONE_PLUS = frozenset(
    {
        "gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma",
        "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text",
        "minimax_m3_vl", "minimax_m3_vl_text", "muse_glimmer", "muse_glimmer_text", "step3p5", "step3p7",
    }
)  # fmt: skip
EPSILON = {"nemotron_h": "layer_norm_epsilon"}  # RMS norms all the same
MULTIPLY, DIVIDE, CAP = ("logit_scale", "lm_head_multiplier"), "logits_scaling", "final_logit_softcapping"


@dataclass(frozen=True)
class Head:
    """Final norm (RMS, `gain` float32 [hidden], `eps`) and output head [at least `vocabulary`, hidden].

    `gain` is what the normed state is multiplied by, whether the checkpoint keeps it so or less one.
    """

    gain: torch.Tensor
    eps: float
    matrix: Matrix
    vocabulary: int
    multiplier: float = 1.0
    cap: float | None = None

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """The final norm of float32 `states` [..., hidden]."""
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps) * self.gain

    def log_probabilities(self, states: torch.Tensor) -> torch.Tensor:
        """log_softmax of the head over `states` [n, hidden] that are normed already: float32 [n, vocabulary]."""
        logits = torch.cat([states @ rows.T for _, rows in self.matrix.blocks(self.vocabulary)], dim=-1)
        return torch.log_softmax(capped(logits * self.multiplier, self.cap), dim=-1)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Gemma 2's soft cap: logits within -cap … cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def read_head(folder: Path) -> Head:
    """Norm and head of the verifier in `folder`; raises Unreadable with the reason.

    The head has the rows that config.json's vocab_size says; padded ones are left out.
    """
    text, files = _text(folder), tensor_files(folder)
    multiplier, cap = _scaling(text)
    eps = text.get(EPSILON.get(text.model_type, "rms_norm_eps"))
    if eps is None:
        raise Unreadable("config.json has no rms_norm_eps: the final norm is no RMS norm")
    found = names.modules(files)
    tied = text.get("tie_word_embeddings")
    if found.head is None and not tied:
        said = "tie_word_embeddings is false" if tied is False else "no tie_word_embeddings says that none is needed"
        raise Unreadable(f"the checkpoint has no lm_head.weight and in its config.json {said}; fetch the missing file")
    matrix = _matrix(text, files, found.embedding if tied or found.head is None else found.head)
    return Head(_gain(text, files, found.norm), float(eps), matrix, text.needed("vocab_size"), multiplier, cap)


def read_embedding(folder: Path) -> Matrix:
    """The embedding rows [at least vocab_size, hidden]; raises Unreadable."""
    text, files = _text(folder), tensor_files(folder)
    return _matrix(text, files, names.modules(files).embedding)


def _text(folder: Path) -> TextFields:
    path = folder / "config.json"
    try:
        return TextFields.of(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error


def _scaling(text: TextFields) -> tuple[float, float | None]:
    multiplier = 1.0
    for name in MULTIPLY:
        multiplier *= float(text.nested.get(name) or 1)
    cap = text.get(CAP) if CAP in text.nested or text.model_type.startswith("gemma") else None
    return multiplier / float(text.nested.get(DIVIDE) or 1), None if cap is None else float(cap)


def _matrix(text: TextFields, files: Mapping[str, Path], module: str) -> Matrix:
    quantization = text.nested.get("quantization_config") or text.config.get("quantization_config") or {}
    matrix = read_matrix(files, names.parts(files, module), quantization)
    hidden, vocabulary = text.needed("hidden_size"), text.needed("vocab_size")
    if matrix.shape[1] != hidden:
        raise Unreadable(f"{matrix.name} is {list(matrix.shape)} and the verifier's hidden_size is {hidden}")
    if matrix.shape[0] < vocabulary:
        raise Unreadable(f"{matrix.name} has {matrix.shape[0]} rows and the verifier's vocab_size is {vocabulary}")
    return matrix


def _gain(text: TextFields, files: Mapping[str, Path], module: str) -> torch.Tensor:
    found = names.parts(files, module)
    if "bias" in found:
        raise Unreadable(f"{module} has a bias: the final norm is no RMS norm")
    if "weight" not in found:
        raise Unreadable(f"{module} has no weight ({', '.join(sorted(found.values()))} in its place)")
    stored = Stored.of(files, found["weight"])
    if stored.dtype not in FLOATS or stored.shape != (text.needed("hidden_size"),):
        raise Unreadable(
            f"{stored.name} is {stored.dtype} {list(stored.shape)} and the verifier's hidden_size is "
            f"{text.needed('hidden_size')}"
        )
    weight = stored.whole().float()
    one_plus = {text.model_type, str(text.config.get("model_type"))} & ONE_PLUS
    return weight + 1 if one_plus else weight
