"""The pocket verifier's curriculum: short tasks with worked reasoning, any number of them from a seed.

    from slipstream.pocket.curriculum import generate
    for task in generate(40, seed=1):
        print(task.prompt, task.thinking, task.answer, sep="\\n")

A prompt determines its reference trace: all that a draw decides stands in the prompt, and the wording of the reasoning
follows from it (the person, the frame, the parity of a number, a letter). So "the verifier answers exactly" is well
defined, and so is a held-out prompt: `is_held_out` looks at nothing but the prompt's hash. The verifier in
`slipstream/pocket/verifier` never saw a held-out prompt.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from slipstream.pocket.kinds import Draft, everyday, letters, lists, numbers
from slipstream.pocket.wording import VOICES, Voice, draw_voice


@dataclass(frozen=True)
class Task:
    """A prompt and its reference trace: `<think>{thinking}</think>{answer}`."""

    kind: str
    prompt: str
    thinking: str
    answer: str

    @property
    def id(self) -> str:
        """`<kind>-<8 hex digits of the prompt's SHA-256>`."""
        return f"{self.kind}-{prompt_hash(self.prompt)[:8]}"


@dataclass(frozen=True)
class Kind:
    """A kind's draw, and how many distinct questions it has at least."""

    draw: Callable[[Random, Voice], Draft]
    questions: int


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "add": Kind(numbers.add, numbers.ADD_QUESTIONS),
        "subtract": Kind(numbers.subtract, numbers.SUBTRACT_QUESTIONS),
        "compare": Kind(numbers.compare, numbers.COMPARE_QUESTIONS),
        "series": Kind(numbers.series, numbers.SERIES_QUESTIONS),
        "sort": Kind(lists.sort, lists.SORT_QUESTIONS),
        "reverse": Kind(lists.reverse, lists.REVERSE_QUESTIONS),
        "extreme": Kind(lists.extreme, lists.EXTREME_QUESTIONS),
        "count": Kind(letters.count, letters.COUNT_QUESTIONS),
        "shift": Kind(letters.shift, letters.SHIFT_QUESTIONS),
        "clock": Kind(everyday.clock, everyday.CLOCK_QUESTIONS),
        "weekday": Kind(everyday.weekday, everyday.WEEKDAY_QUESTIONS),
        "convert": Kind(everyday.convert, everyday.CONVERT_QUESTIONS),
        "price": Kind(everyday.price, everyday.PRICE_QUESTIONS),
        "lookup": Kind(everyday.lookup, everyday.LOOKUP_QUESTIONS),
    }
)


def prompt_hash(prompt: str) -> str:
    """SHA-256 of the prompt's UTF-8 bytes, hexadecimal."""
    return hashlib.sha256(prompt.encode("utf-8")).hexdigest()


def is_held_out(prompt: str) -> bool:
    """True for about one prompt in ten: those that the verifier is never trained on."""
    return int(prompt_hash(prompt)[:8], 16) % 10 == 0


def prompt_space(kind: str) -> int:
    """A lower bound on the number of distinct prompts of a kind."""
    return KINDS[kind].questions * VOICES


def sample(kind: str, rng: Random) -> Task:
    """One task of `kind`, held out or not. Raises KeyError for a kind that does not exist."""
    voice = draw_voice(rng)
    draft = KINDS[kind].draw(rng, voice)
    thinking = voice.thinking(draft.steps, draft.value)
    return Task(kind, voice.prompt(draft.question), thinking, voice.answer(draft.value))


def stream(seed: int, held_out: bool | None = None) -> Iterator[Task]:
    """Endless tasks, the kinds in turn, with repeats; `held_out` keeps only one side of the split."""
    rng = Random(seed)
    while True:
        for kind in KINDS:
            task = sample(kind, rng)
            while held_out is not None and is_held_out(task.prompt) != held_out:
                task = sample(kind, rng)
            yield task


def generate(count: int, seed: int, held_out: bool | None = None) -> list[Task]:
    """`count` tasks with distinct prompts, the kinds in turn: no kind has two more than another.

    The same arguments give the same tasks, and a smaller count a prefix of them. Raises ValueError when `count` asks
    a kind for more than half of its prompts, where draws would repeat without end.
    """
    most = -(-count // len(KINDS))
    for kind in KINDS:
        if most > prompt_space(kind) // 2:
            raise ValueError(f"{count} prompts need {most} of kind {kind!r}, which has {prompt_space(kind)}")
    rng, seen, tasks = Random(seed), set[str](), list[Task]()
    while len(tasks) < count:
        kind = list(KINDS)[len(tasks) % len(KINDS)]
        task = sample(kind, rng)
        if task.prompt in seen or (held_out is not None and is_held_out(task.prompt) != held_out):
            continue
        seen.add(task.prompt)
        tasks.append(task)
    return tasks
