"""Which decoder a drafter gets: the configured shape, a published drafter's, the warm start's, or one of our own.

Our own, for a verifier of any family, is a Llama decoder whose sizes follow from the hidden size alone: heads of 128,
as many as make the hidden size and divide by eight (tensor parallelism), eight key-value heads, an MLP of three times
the hidden size (the ratio that speculators falls back to), full attention.  A verifier's own head_dim (64 in MLA's
rotary part and in gpt-oss, 256 in Gemma), query scaling, q/k norms, expert widths and sliding windows belong to its
attention, not to the drafter's.  What is inherited is where tokens are: rope base and scaling and the longest
position.
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
SMALL = 1024  # narrower than this, heads of 128 would be too few: four heads
MLP_RATIO = 3


def resolve(config: RunConfig) -> DraftShape:
    """The shape of the drafter's decoder layers; raises InputError when it cannot be for this verifier."""
    wanted = config.drafter
    if wanted.shape is not None:
        return wanted.shape
    if wanted.published is not None:
        return _of_this_verifier(published(wanted.published), config).shape
    if wanted.init_from and (file := Path(wanted.init_from) / "config.json").is_file():
        return _of_this_verifier(described.read(file), config).shape
    return from_verifier(verifier.known_shape(config.verifier)[0])


def published(name: str) -> described.Described:
    """A published drafter by its name under slipstream/drafters/; raises InputError, also for one not trainable."""
    folder = resources.files("slipstream") / "drafters"
    file = folder / f"{name}.json"
    if not file.is_file():
        known = sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json"))
        raise InputError(f"drafter.published: no drafter named {name!r}; known are {', '.join(known)}")
    return described.of_config(json.loads(file.read_text(encoding="utf-8")), f"drafter.published {name}")


def from_verifier(shape: verifier.Shape) -> DraftShape:
    """A shape made from the verifier's; raises InputError when its rope is none that drafters are trained with."""
    hidden = shape.hidden_size
    heads = -(-hidden // (HEAD_DIM * GROUP)) * GROUP if hidden >= SMALL else 4
    theta, scaling = shape.rope()
    if shape.max_position_embeddings is None:
        raise InputError(f"{shape.text.where}: no field 'max_position_embeddings' for the drafter; set drafter.shape")
    return DraftShape(
        num_attention_heads=heads,
        num_key_value_heads=GROUP if heads > GROUP else heads,
        head_dim=HEAD_DIM if hidden >= SMALL else max(2, hidden // 8 * 2),
        intermediate_size=MLP_RATIO * hidden,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=shape.max_position_embeddings,
    )


def require_positions(longest: int, shape: DraftShape, where: str) -> None:
    """Raises InputError when contexts of `longest` tokens go beyond the drafter's last position."""
    if longest > shape.max_position_embeddings:
        raise InputError(
            f"verifier.max_model_len: contexts of {longest} tokens go beyond the drafter's last position "
            f"({where}: max_position_embeddings {shape.max_position_embeddings}); lower the one or train a drafter "
            "with more of the other"
        )


def _of_this_verifier(drafter: described.Described, config: RunConfig) -> described.Described:
    shape, where = verifier.known_shape(config.verifier)
    if drafter.hidden_size != shape.hidden_size:
        raise InputError(
            f"{drafter.where}: hidden_size {drafter.hidden_size} is for another verifier than {where} with "
            f"{shape.hidden_size}"
        )
    return drafter
