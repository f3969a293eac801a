"""Whether a store's last state is the verifier's final one, before or after its final norm: seen without a server.

Two signs, both from the verifier's own norm and head (logits = head(norm(state))):

* **The norm's own mark.**  A state after an RMS norm, divided by the norm's weight, has root mean square 1 at every
  token, whatever it says; one before it has not (the pocket verifier: 1.3 to 5.8).
* **Own text.**  A model finds its own text exactly as surprising as its distribution says: the mean negative
  log-likelihood of the supervised tokens equals the mean entropy, or is lower where decoding was greedy.  Logits of a
  state that is not final are sure of themselves and wrong (the pocket verifier's last layer's input: 1.07 against an
  entropy of 0.48 nats; the final state: 0.001 against 0.002).  Text that another model wrote surprises too: then only
  a server can tell.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.verifier_ends import Head

BEFORE, AFTER = "before", "after"
MARK = 0.02  # distance of the root mean square from 1; bfloat16 rounds values to 0.4 %, a token's mean far less
SURPRISE = 0.25  # nats by which own text may be less likely than the distribution says
CHUNK = 256  # tokens whose logits are held at once: 168 MB for 163,840 of them in float32


def normed(head: Head, states: torch.Tensor) -> bool:
    """Whether float32 `states` [tokens, hidden] carry the final norm's mark at every token."""
    mark = (states / head.gain).pow(2).mean(-1).sqrt()
    return bool(((mark - 1).abs() < MARK).all())


@dataclass(frozen=True)
class Surprise:
    """How likely supervised tokens are under states: mean negative log-likelihood and entropy in nats, hit rate."""

    likelihood: float
    entropy: float
    hits: float

    @property
    def excess(self) -> float:
        """Nats by which the tokens are less likely than the distribution itself says; at most 0 for own text."""
        return self.likelihood - self.entropy

    def __str__(self) -> str:
        return f"{self.likelihood:.2f} nats a token where its entropy is {self.entropy:.2f}, {self.hits:.0%} argmax"


def surprise(head: Head, states: torch.Tensor, targets: torch.Tensor) -> Surprise:
    """The figures of float32 `states` [tokens, hidden], after the norm, that should predict `targets` [tokens]."""
    likelihood = entropy = hits = 0.0
    for start in range(0, len(targets), CHUNK):
        part, wanted = states[start : start + CHUNK], targets[start : start + CHUNK]
        log = head.log_probabilities(part)
        likelihood -= float(log.gather(1, wanted[:, None]).sum())
        entropy -= float((log.exp() * log).sum())
        hits += float((log.argmax(-1) == wanted).sum())
    count = max(1, len(targets))
    return Surprise(likelihood / count, entropy / count, hits / count)


@dataclass(frozen=True)
class Seen:
    """What was seen in a few samples: where the final norm stands, and how surprising each position finds the text."""

    final_state: str
    surprises: list[Surprise]
    tokens: int

    @property
    def last(self) -> Surprise:
        """That of the last position, read as `final_state`."""
        return self.surprises[-1]

    @property
    def own_text(self) -> bool:
        """Whether the last position can only be the final state of the model that wrote the text."""
        return self.last.excess < SURPRISE and all(self.last.likelihood <= other.likelihood for other in self.surprises)


def look(head: Head, samples: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], most: int = 512) -> Seen:
    """Looks at samples of (float32 states [tokens, layers, hidden], token ids, loss mask), at `most` tokens in all.

    A position's tokens are those before a supervised token: that token is what it must predict.
    """
    kept: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for states, tokens, mask in samples:
        supervised = torch.nonzero(mask[1:]).flatten()[: most // len(samples)]
        kept.append(states[supervised])
        wanted.append(tokens[1:][supervised])
    states, targets = torch.cat(kept), torch.cat(wanted)
    after = bool(len(states)) and normed(head, states[:, -1])
    columns = [head.normed(states[:, i]) for i in range(states.shape[1])]
    if after:
        columns[-1] = states[:, -1]
    return Seen(AFTER if after else BEFORE, [surprise(head, column, targets) for column in columns], len(targets))
