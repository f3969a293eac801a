"""Who asks, how, and in which voice the answer is thought: the wording around every task of the curriculum.

A `Voice` is a person and a way to ask (a frame). Both stand in the prompt, so that everything chosen from them can be
learned: how the think block opens (by the person), which linking word it uses (by the person), how it closes (by the
frame) and whether the answer is a sentence (by the frame). A draft model that sees only the latest words has to guess
there, a verifier that read the prompt need not.
"""

from dataclasses import dataclass
from random import Random

NAMES = [
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ivo",
    "Kim",
    "Leo",
    "Mia",
    "Olga",
    "Sam",
    "Tom",
    "Zoe",
]

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
)

LINKS = ("so", "then")

CLOSINGS = ("I get {value}.", "That gives {value}.", "I can tell {name}: {value}.")


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
        return LINKS[self.person % len(LINKS)]

    @property
    def polite(self) -> bool:
        return self.frame in (2, 3)

    def prompt(self, question: str) -> str:
        return FRAMES[self.frame].format(name=self.name, question=question)

    def thinking(self, steps: str, value: str) -> str:
        opening = OPENINGS[self.person * 3 % len(OPENINGS)].format(name=self.name)
        closing = CLOSINGS[2 if self.polite else self.frame % 2].format(name=self.name, value=value)
        return f"{opening} {steps} {closing}"

    def answer(self, value: str) -> str:
        return f"It is {value}, {self.name}." if self.polite else value


VOICES = len(NAMES) * len(FRAMES)
"""How many voices there are, all with different prompts for the same question."""


def draw_voice(rng: Random) -> Voice:
    return Voice(rng.randrange(len(NAMES)), rng.randrange(len(FRAMES)))
