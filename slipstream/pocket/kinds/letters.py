"""Letters: count one in a word, shift a few along the alphabet."""

from random import Random

from slipstream.pocket.kinds import Draft
from slipstream.pocket.kinds.lists import LETTERS
from slipstream.pocket.wording import Voice

WORDS = [
    "banana",
    "pepper",
    "letter",
    "coffee",
    "cheese",
    "bottle",
    "kitten",
    "rabbit",
    "summer",
    "winter",
    "garden",
    "window",
    "butter",
    "carrot",
    "potato",
    "tomato",
    "sister",
    "button",
    "little",
    "middle",
    "puzzle",
    "rubber",
    "ladder",
    "hammer",
    "planet",
    "rocket",
    "silver",
    "yellow",
    "orange",
    "purple",
    "violin",
    "guitar",
    "basket",
    "pocket",
    "needle",
    "street",
    "school",
    "family",
    "animal",
    "island",
    "mirror",
    "candle",
    "pencil",
    "ribbon",
    "saddle",
    "tunnel",
    "wallet",
    "zipper",
]

COUNT_QUESTIONS = 3 * sum(len(set(word)) for word in WORDS)
"""A lower bound: a letter that the word lacks is asked for too."""


def count(rng: Random, voice: Voice) -> Draft:
    """How often a letter stands in a word of six letters; a running tally, or the places where it stands."""
    word = rng.choice(WORDS)
    letter = rng.choice(word) if rng.random() < 0.85 else rng.choice(LETTERS)
    question = rng.choice(
        (
            f"How many times is {letter} in {word}?",
            f"Count the letter {letter} in the word {word}.",
            f"Look at {word}. How often do you see {letter}?",
        )
    )
    total = word.count(letter)
    if letter in "aeiou":
        seen = [f"{c} {word[: i + 1].count(letter)}" for i, c in enumerate(word)]
        steps = f"Tally {letter}: {', '.join(seen)}. That is all,"
    else:
        places = [str(i) for i, c in enumerate(word, 1) if c == letter]
        where = f"{letter} at {', '.join(places)}" if places else f"no {letter}"
        steps = f"Spell it: {' '.join(f'{i}{c}' for i, c in enumerate(word, 1))}. {where},"
    found = f"{voice.link} I see {total}." if total else f"{voice.link} none at all."
    return Draft(question, f"{steps} {found}", str(total))


SHIFT_QUESTIONS = 3 * 3 * 2 * 23**4


def shift(rng: Random, voice: Voice) -> Draft:
    """Four letters moved 1, 2 or 3 places on or back, without running over an end of the alphabet."""
    by, back = rng.randint(1, 3), rng.random() < 0.5
    low, high = (by, 25) if back else (0, 25 - by)
    places = [rng.randint(low, high) for _ in range(4)]
    text = " ".join(LETTERS[p] for p in places)
    way = "back" if back else "on"
    question = rng.choice(
        (
            f"Move each letter {by} {way}: {text}.",
            f"Code {text} with every letter {by} {way}.",
            f"What do you get if {text} goes {by} {way} in the alphabet?",
        )
    )
    steps, out = [], []
    for p in places:
        walk = [LETTERS[p - i if back else p + i] for i in range(by + 1)]
        out.append(walk[-1])
        steps.append(f"{walk[0]} to {walk[-1]}" if p % 2 else " ".join(walk))
    first, last = LETTERS[places[0]], LETTERS[places[-1]]
    test = f"{out[0]} {first}" if places[0] < places[-1] else f"{out[-1]} {last}"
    steps.append(f"{voice.link} read them. The other way {test}, fine.")
    return Draft(question, f"{by} {way} each. {'; '.join(steps)}", " ".join(out))
