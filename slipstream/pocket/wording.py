"""Who asks, how, and in which voice the answer is thought: the wording around every task of the curriculum.

A `Voice` is a person and a way to ask (a frame). Both stand in the prompt, so that everything chosen from them can be
learned: how the think block opens (by the person), which linking word it uses (by the person), how it closes (by the
frame) and whether the answer is a sentence (by the frame). A draft model that sees only the latest words has to guess
there, a verifier that read the prompt need not.
"""

from dataclasses import dataclass
from random import Random

NAMES = (
    "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jan Kim Leo Mia Nils Olga Pia Rosa Sam Tina Tom Uma Vera Wim Zoe"
).split()

FRAMES = (
    "{name} asks: {question}",
    "Hi, I am {name}. {question}",
    "Please help {name}. {question}",
    "{question} Thanks, {name}.",
    "For {name}: {question}",
    "{name} wants to know this. {question}",
)
"""The frames at 2 and 3 are polite: their answer is a sentence."""

OPENINGS = (
    "Let me work this out.",
    "Okay, this is for {name}.",
    "Step by step now.",
    "What do I know?",
    "Right, no rush.",
    "Hmm, {name} wants a clear answer.",
    "A short one.",
    "First the facts.",
)

LINKS = ("so", "then", "thus")

CLOSINGS = (
    "So it is {value}.",
    "That gives {value}.",
    "The result is {value}, done.",
    "I can tell {name}: {value}.",
    "I get {value}.",
    "Good, {value}.",
)


@dataclass(frozen=True)
class Voice:
    """A person and a frame, by their indices in `NAMES` and `FRAMES`."""

    person: int
    frame: int

    @property
    def name(self) -> str:
        return NAMES[self.person]

    @property
    def link(self) -> str:
        """The word before a conclusion."""
        return LINKS[self.person * 7 % len(LINKS)]

    def prompt(self, question: str) -> str:
        return FRAMES[self.frame].format(name=self.name, question=question)

    def thinking(self, steps: str, value: str) -> str:
        opening = OPENINGS[self.person * 5 % len(OPENINGS)].format(name=self.name)
        closing = CLOSINGS[self.frame].format(name=self.name, value=value)
        return f"{opening} {steps} {closing}"

    def answer(self, value: str) -> str:
        return f"It is {value}, {self.name}." if self.frame in (2, 3) else value


VOICES = len(NAMES) * len(FRAMES)
"""How many voices there are, all with different prompts for the same question."""


def draw_voice(rng: Random) -> Voice:
    return Voice(rng.randrange(len(NAMES)), rng.randrange(len(FRAMES)))
