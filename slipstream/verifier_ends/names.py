"""Which of a checkpoint's modules are the language model's own embedding, output head and final norm.

A suffix is not enough: prediction layers (`model.layers.61.shared_head.head`, `mtp.norm`) and towers for pictures and
sound have modules of the same names.  A module of a numbered layer or of such a part is never taken; the norm is the
embedding's sibling and the head lies beside or above it, under whatever prefix (`language_model.model.` for Kimi-K2.5,
`model.language_model.` for Qwen3-VL).  Other names for the three are those that speculators knows
(speculators/utils/loading.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipstream.verifier_ends.files import Unreadable

EMBEDDING = ("embed_tokens", "tok_embeddings", "llm.embed", "backbone.embeddings")
HEAD = ("lm_head", "output", "llm.unembed")
NORM = ("norm", "norm_f")
# Parts of a module's path that belong to something else than the language model.
ELSEWHERE = re.compile(
    r"^(mtp|nextn|medusa|eagle|draft|vis|vit$|image|img|audio|speech|video|sound|talker|code|token2|encoder|projector"
    r"|multi_modal|mm_|resampler|connector|merger|aligner|shared_head)|(_mtp|_projector|_vision|_encoder)$"
)
PARTS = re.compile(r"^(?P<module>.+?)\.(?P<part>weight(?:[._].*)?|qweight|qzeros|scales|g_idx|bias|SCB|blocks)$")


@dataclass(frozen=True)
class Modules:
    """Paths of the three modules; `head` is None where the checkpoint has none of its own."""

    embedding: str
    norm: str
    head: str | None


def parts(names: Iterable[str], module: str) -> dict[str, str]:
    """A module's tensors by what they are to it: `weight`, `weight_scale`, `bias` …"""
    found = (PARTS.match(name) for name in names if name.startswith(f"{module}."))
    return {match["part"]: match.string for match in found if match and match["module"] == module}


def modules(names: Mapping[str, object]) -> Modules:
    """The three modules among a checkpoint's tensor names; raises Unreadable with the one that is not clear."""
    known = {match["module"] for name in names if (match := PARTS.match(name))}
    own = {module for module in known if not _elsewhere(module)}
    norms = _ending(own, NORM)
    found = _ending(own, EMBEDDING)
    siblings = [module for module in found if any(_parent(norm) == _parent(module) for norm in norms)]
    embedding = _only(siblings or found, EMBEDDING[0], names)
    beside = [norm for norm in norms if _parent(norm) == _parent(embedding)]
    heads = [head for head in _ending(own, HEAD) if _above(head, embedding)]
    head = _only(heads, HEAD[0], names) if heads else None
    return Modules(embedding, _only(beside or norms, "model.norm", names), head)


def _ending(modules: set[str], endings: tuple[str, ...]) -> list[str]:
    """The modules with the first of these endings that any has, by whole components."""
    for ending in endings:
        if found := sorted(module for module in modules if f".{module}".endswith(f".{ending}")):
            return found
    return []


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _elsewhere(module: str) -> bool:
    return any(part.isdigit() or ELSEWHERE.search(part) for part in module.split("."))


def _above(head: str, embedding: str) -> bool:
    """Whether the head's parent contains the embedding: a head of another part does not."""
    return not _parent(head) or embedding.startswith(f"{_parent(head)}.")


def _only(found: list[str], wanted: str, names: Mapping[str, object]) -> str:
    if len(found) == 1:
        return found[0]
    if found:
        raise Unreadable(f"the checkpoint has {' and '.join(found)}: which one is {wanted} is not clear")
    close = [name for name in names if f".{wanted.rpartition('.')[2]}." in f".{name}"]
    beside = f" of the language model ({min(close, key=len)} belongs to another part)" if close else ""
    raise Unreadable(f"the checkpoint has no {wanted}.weight{beside}")
