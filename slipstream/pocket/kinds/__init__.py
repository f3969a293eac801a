"""The kinds of task: each a function that draws one question and works it out.

A function `kind(rng, voice)` returns a `Draft`. All that it draws stands in the question, so the question alone
determines the steps. Beside each function stands the number of distinct questions that it can draw.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Draft:
    """A question, the steps that compute its answer, and the bare answer."""

    question: str
    steps: str
    value: str
