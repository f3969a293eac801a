"""Whether a drafter can start from a checkpoint: widths, conventions, mapping, each refused by name with both values.

From headers and config.json alone, before a server or a GPU is touched.  What is compared is what the weights were
trained under: hidden size, vocabulary, heads, MLP, norms and their options, rope, the layers listened to, every
tensor's shape.  The longest position is no such thing (no weight depends on it).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream import verifier
from slipstream.config import DraftShape, RunConfig
from slipstream.drafter import opened
from slipstream.drafter import shape as drafter_shape
from slipstream.drafter.warm_start_source import FLOATS, Checkpoint, read
from slipstream.errors import InputError

HEAD = "lm_head.weight"
# Not the drafter's own: of the verifier or of the vocabulary; or computed.
OTHERS = ("embed_tokens.weight", HEAD, "d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
COMPUTED = "rotary_emb.inv_freq"
NOT_COMPARED = frozenset({"num_layers", "max_position_embeddings"})


def trained(shape: DraftShape, hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what training changes, the head apart; `layers`: auxiliary states a token."""
    fields = shape.model_dump()
    says = {
        **fields,
        "transformer_layer_config": {**fields, "hidden_size": hidden, "vocab_size": 0},
        "eagle_aux_hidden_state_layer_ids": range(layers),
        "draft_vocab_size": 0,
    }
    return {name: size for name, size in opened.expected(says).items() if name not in OTHERS}


def of_run(config: RunConfig) -> Checkpoint | None:
    """The checked warm start of a run; None without `drafter.init_from`.  Raises InputError, see `check`."""
    if not config.drafter.init_from:
        return None
    target = verifier.load_shape(config.verifier)
    shape, folder = drafter_shape.resolve(config), Path(config.drafter.init_from)
    return check(folder, shape, target.hidden_size, target.vocab_size, config.features.layer_ids)


def check(folder: Path, shape: DraftShape, hidden: int, vocab: int, layer_ids: list[int]) -> Checkpoint:
    """The checkpoint in `folder` if a drafter of this shape can start from it.

    Raises InputError naming every convention that differs, else the first tensor that is missing, unknown, quantised
    or of another shape, or the mapping that is missing or for another vocabulary.
    """
    found = read(folder)
    if wrong := _conventions(found, shape, hidden, vocab, layer_ids):
        raise InputError(
            f"{folder}: this drafter was made with {'; '.join(wrong)}; set drafter.shape and features.layer_ids as it "
            "has them, or start from another"
        )
    _tensors(found, trained(shape, hidden, len(layer_ids)))
    _mapping(found, hidden, vocab)
    return found


def _conventions(found: Checkpoint, shape: DraftShape, hidden: int, vocab: int, layer_ids: list[int]) -> list[str]:
    says = found.says
    pairs: list[tuple[str, Any, Any]] = [
        ("hidden_size", says.hidden_size, hidden),
        ("vocab_size", says.vocab_size, vocab),
    ]
    names = [name for name in type(shape).model_fields if name not in NOT_COMPARED]
    pairs += [(name, getattr(says.shape, name), getattr(shape, name)) for name in names]
    if says.layer_ids is not None:
        pairs.append(("auxiliary layers", says.layer_ids, layer_ids))
    return [
        f"{name} {_plain(theirs)} where this run has {_plain(ours)}" for name, theirs, ours in pairs if theirs != ours
    ]


def _plain(value: Any) -> str:
    return str(value.model_dump(exclude_none=True)) if hasattr(value, "model_dump") else str(value)


def _tensors(found: Checkpoint, wanted: dict[str, tuple[int, ...]]) -> None:
    folder, held = found.folder, found.tensors
    for name in sorted(held):
        if name in wanted or name in (HEAD, "embed_tokens.weight"):
            if held[name].dtype not in FLOATS:
                raise InputError(f"{folder}: {held[name].name} is {held[name].dtype}, quantised; start from floats")
        elif name not in OTHERS and not name.endswith(COMPUTED):
            raise InputError(f"{folder}: tensor {held[name].name} has no place in this drafter; check drafter.shape")
    for name, shape in wanted.items():
        if name not in held:
            raise InputError(f"{folder}: tensor {name} is missing, so this drafter cannot start from it")
        if held[name].shape != shape:
            raise InputError(
                f"{folder}: tensor {held[name].name} is {list(held[name].shape)}, this drafter needs {list(shape)}; "
                "check drafter.shape and features.layer_ids"
            )


def _mapping(found: Checkpoint, hidden: int, vocab: int) -> None:
    """The head's rows must be those of known tokens."""
    head = found.tensors.get(HEAD)
    if found.maps is not None and len(found.maps[0]) != vocab:
        size = len(found.maps[0])
        raise InputError(f"{found.folder}: its mapping is for {size} target tokens and the verifier has {vocab}")
    if head is None:
        return
    if found.maps is None and head.shape[0] != vocab:
        raise InputError(
            f"{found.folder}: no d2t and t2d beside a head of {head.shape[0]} rows where the verifier has {vocab} "
            "tokens: nothing says which tokens they are; fetch the mapping too"
        )
    rows = vocab if found.maps is None else len(found.maps[1])
    if head.shape != (rows, hidden):
        raise InputError(f"{found.folder}: {head.name} is {list(head.shape)}, its mapping needs {[rows, hidden]}")
