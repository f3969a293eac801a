"""Which layer each position of a store is, in vLLM's ids, and whether its last state is the final one.

vLLM: id k is the residual stream before layer k, so the final state of a verifier with N layers is id N.  The older
convention: id k is the output of layer k, so the same state is id N - 1.  `60` as the last of 61 layers is therefore
either the final state or the input of the last layer, which trains a drafter on wrong targets without an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import InputError
from slipstream.imports.found import OUTPUT, VLLM

MEANING = {VLLM: "the residual stream before layer k", OUTPUT: "the output of layer k"}


def translate(layer_ids: Sequence[int], convention: str) -> list[int]:
    """vLLM's ids of the states that `layer_ids` name under `convention`."""
    return [layer + (1 if convention == OUTPUT else 0) for layer in layer_ids]


def back(layer_ids: Sequence[int], convention: str) -> list[int]:
    """The inverse: what `convention` calls these states of vLLM's."""
    return [layer - (1 if convention == OUTPUT else 0) for layer in layer_ids]


def positions(where: str, layer_ids: Sequence[int], convention: str, wanted: Sequence[int]) -> list[int]:
    """At which positions of the store the states `wanted` (vLLM's ids, the final one last) lie.

    `layer_ids` are the store's under `convention`, `where` names it in errors.  Raises InputError: an id that the
    verifier does not have, the final state among the auxiliary ones, a last state that is not final, ids that are
    missing.
    """
    final = wanted[-1]
    ids = translate(layer_ids, convention)
    refuse_unknown(where, layer_ids, convention, final)
    if ids[-1] != final:
        raise InputError(_not_final(where, layer_ids, convention, wanted))
    if repeated := [k for k in ids if ids.count(k) > 1]:
        raise InputError(
            f"{where}: layer id {back(repeated[:1], convention)[0]} stands there twice in {list(layer_ids)}"
        )
    if missing := [k for k in wanted if k not in ids]:
        raise InputError(
            f"{where}: holds the layers {ids} in vLLM's ids and features.layer_ids wants {list(wanted[:-1])}: "
            f"{missing} "
            f"are not there; set features.layer_ids to {ids[:-1]} or capture the store again"
        )
    return [ids.index(k) for k in wanted]


def refuse_unknown(where: str, layer_ids: Sequence[int], convention: str, final: int) -> None:
    """Raises InputError for ids out of range and for the final state among the auxiliary ones."""
    lowest, highest = back([0, final], convention)
    if wrong := [layer for layer in layer_ids if not lowest <= layer <= highest]:
        raise InputError(
            f"{where}: layer id {wrong[0]} is out of range; with {final} layers the convention {convention!r} "
            f"({MEANING[convention]}) has ids {max(lowest, 0)} to {highest}"
        )
    if highest in layer_ids[:-1]:
        raise InputError(
            f"{where}: layer id {highest} is the final state of this verifier and stands among the auxiliary ones "
            f"{list(layer_ids[:-1])}; only the last id, here {layer_ids[-1]}, may be it"
        )


def _not_final(where: str, layer_ids: Sequence[int], convention: str, wanted: Sequence[int]) -> str:
    final, last = wanted[-1], translate(layer_ids, convention)[-1]
    said = f"id {last}" if convention == VLLM else f"id {layer_ids[-1]} ({last} in vLLM's ids)"
    what = "the input of the last layer" if last == final - 1 else f"the input of layer {last}"
    other = ""
    if convention == VLLM and last == final - 1:
        other = f" (if its ids name outputs, where {last} is the final state, say --convention {OUTPUT})"
    return (
        f"{where}: its last state is {said}, {what}; the final state is id {final}: capture the store again with layer "
        f"ids {list(wanted)}{other}"
    )
