"""What is wrong with states that failed a probe, in one sentence.

The faults, each with what gives it away:

* another layer convention: the states equal the verifier's at another layer id;
* a double norm: the final state equals norm(final state), or explains the server's log-probabilities without the norm;
* a missing norm: the final state is said to have passed the norm, and explains the server only with it;
* another request's states: they are those of another stored sample, or follow other tokens than the sample's;
* a changed verifier: they follow the sample's tokens and still differ at every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from slipstream.features import last_state
from slipstream.features.distance import affinity, relative, relative_rows
from slipstream.features.last_state import Agreement
from slipstream.features.recipe import POST_NORM
from slipstream.features.tolerance import Tolerance
from slipstream.verifier_ends import Head

FEW = 0.5  # share of tokens below which a difference is said of tokens, not of the whole sample


@dataclass(frozen=True)
class Layers:
    """The layer ids of a sample by position, of a verifier with `count` layers."""

    ids: Sequence[int]
    count: int

    def name(self, layer_id: int) -> str:
        """`5 (the input of the last layer)`."""
        meanings = {0: "the embedding", self.count - 1: "the input of the last layer", self.count: "the final state"}
        return f"{layer_id} ({meanings.get(layer_id, f'the input of layer {layer_id}')})"


@dataclass(frozen=True)
class Sample:
    """A stored sample beside what the server says about its tokens now.

    Both states are float32 [tokens, layers, hidden] in the store's convention: with a final state after the norm,
    `again`'s is normed.
    """

    token_ids: Sequence[int]
    stored: torch.Tensor
    again: torch.Tensor
    served: list[dict[int, float]] | None
    twins: Callable[[], Iterable[tuple[str, torch.Tensor]]] = lambda: ()  # stored samples of the same length


def errors(sample: Sample) -> list[float]:
    """The relative error of each layer position."""
    return [relative(sample.stored[:, at], sample.again[:, at]) for at in range(sample.stored.shape[1])]


def agreement(sample: Sample, head: Head, final_state: str, tolerance: Tolerance) -> Agreement | None:
    """The last-state probe of the stored final state; None without the server's log-probabilities."""
    if sample.served is None:
        return None
    state = sample.stored[:, -1]
    normed = state if final_state == POST_NORM else head.normed(state)
    return last_state.compare(head, normed, sample.served, tolerance)


def misplaced(
    distances: Mapping[int, Mapping[int, float]], layers: Layers, tolerance: Tolerance, whose: str
) -> str | None:
    """The sentence for a wrong layer convention, None when no position holds another id's state.

    `distances[position][id]` is the relative distance of a position's states to the verifier's at that id.
    """
    found = {}
    for position, by_id in distances.items():
        nearest = min(by_id, key=lambda layer_id: by_id[layer_id])
        if nearest != layers.ids[position] and by_id[nearest] <= tolerance.states:
            found[position] = nearest
    if not found:
        return None
    position, holds = next(iter(found.items()))
    sentence = (
        f"{whose} layer position {position} holds id {layers.name(holds)}, not {layers.name(layers.ids[position])}"
    )
    shifts = {layers.ids[at] - layer_id for at, layer_id in found.items()}
    if len(found) > 1 and len(shifts) == 1:
        (shift,) = shifts
        way = "high" if shift > 0 else "low"
        sentence += f", and so do {len(found)} of {len(layers.ids)} positions: its layer ids are {abs(shift)} too {way}"
    return sentence


def store_fault(
    sample: Sample, layers: Layers, final_state: str, head: Head | None, tolerance: Tolerance
) -> str | None:
    """Why the stored states are not those that the server gives for the same tokens; None when they are."""
    wrong = [at for at, error in enumerate(errors(sample)) if not error <= tolerance.states]
    if not wrong:
        return None
    distances = {
        at: {layers.ids[to]: relative(sample.stored[:, at], sample.again[:, to]) for to in range(len(layers.ids))}
        for at in wrong
    }
    final = len(layers.ids) - 1
    if sentence := misplaced(distances, layers, tolerance, "the stored"):
        return sentence
    if wrong == [final] and head is not None:
        stored, again = sample.stored[:, final], sample.again[:, final]
        if final_state == POST_NORM and relative(head.normed(stored), again) <= tolerance.states:
            return "the stored final state lacks the final norm that its flag promises: the norm would be missing"
        if final_state != POST_NORM and relative(stored, head.normed(again)) <= tolerance.states:
            return "the stored final state has passed the final norm already, which training would then apply twice"
    rows = relative_rows(sample.stored[:, wrong], sample.again[:, wrong]).amax(-1) > tolerance.states
    if rows.float().mean() < FEW:
        places = rows.nonzero().flatten().tolist()
        return (
            f"the stored states differ at {len(places)} of {len(rows)} tokens, the first is token {places[0]}: "
            "part of the sample is not what the server computes"
        )
    return _others(sample, wrong, layers, tolerance, distances[wrong[0]][layers.ids[wrong[0]]])


def _others(sample: Sample, wrong: list[int], layers: Layers, tolerance: Tolerance, error: float) -> str:
    for name, states in sample.twins():
        if max(relative(states[:, at], sample.again[:, at]) for at in wrong) <= tolerance.states:
            return f"the stored states are those of another request: this sample's own lie in {name}"
    lowest = wrong[0]
    stored = affinity(sample.stored[:, lowest], sample.token_ids)
    right = affinity(sample.again[:, lowest], sample.token_ids)
    seen = f"relative error {error:.2g} at id {layers.ids[lowest]}"
    if stored is None or right is None or right <= 0:
        return f"the stored states differ ({seen}): they belong to other tokens or to other weights"
    if stored < right / 2:
        return f"the stored states are those of another request: they follow other tokens than this sample's ({seen})"
    return (
        f"the stored states are those of other weights: they follow this sample's tokens and differ from id "
        f"{layers.ids[lowest]} on ({seen}), so the verifier has changed since"
    )


def final_fault(sample: Sample, final_state: str, head: Head, tolerance: Tolerance) -> str | None:
    """Why the final state, which the server gives as it is stored, does not explain the server; None when it does."""
    as_said = agreement(sample, head, final_state, tolerance)
    if as_said is None or sample.served is None or as_said.within(tolerance):
        return None
    state = sample.stored[:, -1]
    if final_state == POST_NORM:
        other = last_state.compare(head, head.normed(state), sample.served, tolerance)
        if other is not None and other.within(tolerance):
            return "the final state is said to have passed the final norm and has not: the norm would be missing"
    else:
        other = last_state.compare(head, state, sample.served, tolerance)
        if other is not None and other.within(tolerance):
            scale = float((state / head.gain).pow(2).mean(-1).sqrt().median())
            if abs(scale - 1) < 0.05:  # a normed row divided by the gain has a mean square of 1
                return "the final state has passed the final norm already, which training would then apply twice"
            return "the server answers without the verifier's final norm: its final norm is missing"
    return (
        f"the final state does not explain the server's own log-probabilities, with the final norm or without "
        f"(likeliest token equal at {as_said.argmax:.1%}, mean difference {as_said.mean_difference:.3g}): it is not "
        f"the state after the last layer, or the server has other weights than the verifier's folder"
    )
