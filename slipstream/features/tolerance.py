"""How far an intact store may be from the server that made it, by type: what the probes measure against.

Set from 48 traces of the pocket verifier on vllm 0.32 (CPU), stored at 16 requests at a time and captured again alone:

| type | states, worst layer | log-probabilities, worst sample | a doubled norm, best sample |
|---|---|---|---|
| float32 | 8e-8 | 7e-8 | 0.277 |
| float16 | 0 | 0.003 | 0.277 |
| bfloat16 | 0.035 | 0.059 | 0.276 |
| float8 of float32 | 1e-7 | 0.078 | |
| float8 of bfloat16 | 0.040 | 0.103 | |

States of low precision differ because a near-tie of the router sends a token to another expert; the log-probabilities
of float8 because a state keeps three bits of mantissa (2.7 % of its norm).
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.features.sample import FP8

MIN_AGREEMENT = 0.99  # share of positions whose likeliest token is the server's, near-ties apart


@dataclass(frozen=True)
class Tolerance:
    """`states`: relative error of a layer; `logprobs`: mean difference in nats; `tie`: nats that decide no argmax."""

    states: float
    logprobs: float
    tie: float


TOLERANCES = {
    "float32": Tolerance(states=1e-4, logprobs=0.01, tie=1e-3),
    "float16": Tolerance(states=0.02, logprobs=0.03, tie=0.03),
    "bfloat16": Tolerance(states=0.1, logprobs=0.1, tie=0.1),
    FP8: Tolerance(states=0.1, logprobs=0.15, tie=0.25),
}
