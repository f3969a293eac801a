"""Which decoder a drafter gets: the configured shape, a published drafter's, the warm start's, or one of our own.

Our own, for a verifier of any family, is a Llama decoder whose sizes follow from the hidden size alone: heads of 128,
at least as many as make the hidden size, a multiple of eight (tensor parallelism) that divides it (as transformers'
LlamaConfig demands), eight key-value heads, an MLP of three times the hidden size (speculators' fallback), full
attention.  A verifier's own head_dim (64 in MLA's rotary part and in gpt-oss, 256 in Gemma), query scaling, q/k norms,
expert widths and sliding windows belong to its attention, not to the drafter's.  What is inherited is where tokens are:
rope base and scaling and the longest position.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from slipstream import verifier
from slipstream.config import DraftShape, RunConfig
from slipstream.drafter import described
from slipstream.errors import InputError

HEAD_DIM, GROUP = 128, 8
SMALL, FEW = 1024, 4  # narrower than this, heads of 128 would be too few: four of a quarter
MLP_RATIO = 3


def resolve(config: RunConfig) -> DraftShape:
    """The shape of the drafter's decoder layers; raises InputError when it cannot be for this verifier."""
    target, where = verifier.known_shape(config.verifier)
    made = _wanted(config, target, where)
    if target.hidden_size % made.num_attention_heads:
        raise InputError(
            f"drafter.shape: num_attention_heads {made.num_attention_heads} do not divide hidden_size "
            f"{target.hidden_size} of {where}, which transformers' LlamaConfig demands; set another number"
        )
    return made


def _wanted(config: RunConfig, target: verifier.Shape, where: str) -> DraftShape:
    wanted = config.drafter
    if wanted.shape is not None:
        return wanted.shape
    if wanted.published is not None:
        return _of_width(published(wanted.published), target, where)
    if wanted.init_from and (file := Path(wanted.init_from) / "config.json").is_file():
        return _of_width(described.read(file), target, where)
    return from_verifier(target)


def _of_width(drafter: described.Described, target: verifier.Shape, where: str) -> DraftShape:
    if drafter.hidden_size != target.hidden_size:
        raise InputError(
            f"{drafter.where}: hidden_size {drafter.hidden_size} is for another verifier than {where} with "
            f"{target.hidden_size}"
        )
    return drafter.shape


def published(name: str) -> described.Described:
    """A published drafter by its name under slipstream/drafters/; raises InputError, also for one not trainable."""
    folder = resources.files("slipstream") / "drafters"
    file = folder / f"{name}.json"
    if not file.is_file():
        known = sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json"))
        raise InputError(f"drafter.published: no drafter named {name!r}; known are {', '.join(known)}")
    return described.of_config(json.loads(file.read_text(encoding="utf-8")), f"drafter.published {name}")


def from_verifier(target: verifier.Shape) -> DraftShape:
    """A shape made from the verifier's; raises InputError when its rope is none that drafters are trained with."""
    hidden = target.hidden_size
    first, step = (-(-hidden // (HEAD_DIM * GROUP)) * GROUP, GROUP) if hidden >= SMALL else (FEW, FEW)
    heads = next((count for count in range(first, hidden + 1, step) if hidden % count == 0), None)
    positions, where = target.max_position_embeddings, target.text.where
    if heads is None or positions is None:
        raise InputError(
            f"{where}: hidden_size {hidden} and max_position_embeddings {positions} say no drafter's decoder; set "
            "drafter.shape"
        )
    theta, scaling = target.rope()
    return DraftShape(
        num_attention_heads=heads,
        num_key_value_heads=min(GROUP, heads),
        head_dim=HEAD_DIM if hidden >= SMALL else max(2, hidden // (2 * heads) * 2),
        intermediate_size=MLP_RATIO * hidden,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positions,
    )


def require_positions(longest: int, shape: DraftShape, where: str) -> None:
    """Raises InputError when contexts of `longest` tokens go beyond the drafter's last position."""
    if longest > shape.max_position_embeddings:
        raise InputError(
            f"verifier.max_model_len: contexts of {longest} tokens go beyond the drafter's last position "
            f"({where}: max_position_embeddings {shape.max_position_embeddings}); lower the one or train a drafter "
            "with more of the other"
        )
