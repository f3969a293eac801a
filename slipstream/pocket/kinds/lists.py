"""Short lists: sort, reverse, find the greatest or least."""

from math import perm
from random import Random

from slipstream.pocket.kinds import Draft
from slipstream.pocket.wording import Voice

LETTERS = "abcdefghijklmnopqrstuvwxyz"

SORT_QUESTIONS = 2 * 2 * (perm(26, 4) + perm(9, 5))


def sort(rng: Random, voice: Voice) -> Draft:
    """Five digits or four letters, up or down; the next one is picked and what is left is named."""
    digits = rng.random() < 0.5
    items = rng.sample("123456789", 5) if digits else rng.sample(LETTERS, 4)
    down = rng.random() < 0.5
    shown = ", ".join(items)
    way = "from high to low" if down else "from low to high"
    question = rng.choice((f"Sort {shown} {way}.", f"Put these in order {way}: {shown}."))
    order, left, steps = sorted(items, reverse=down), list(items), []
    for i, item in enumerate(order[:-1]):
        left.remove(item)
        rest = " ".join(left)
        word = ("High" if down else "Low") if i == 0 else "next"
        steps.append(f"{word} is {item}, left {rest}" if i == 0 else f"{word} {item}, left {rest}")
    last = f"{voice.link} {order[-1]} is last."
    return Draft(question, "; ".join(steps) + f"; {last}", ", ".join(order))


WORDS = [
    "ball",
    "bell",
    "boat",
    "cake",
    "coat",
    "cup",
    "door",
    "fish",
    "flag",
    "fork",
    "hat",
    "lamp",
    "leaf",
    "moon",
    "rope",
    "ring",
    "rock",
    "shoe",
    "star",
    "tree",
]

REVERSE_QUESTIONS = 3 * (perm(26, 5) + perm(len(WORDS), 4))


def reverse(rng: Random, voice: Voice) -> Draft:
    """Five letters or four words; counted from the end when the first letter is in a … m, else swapped in pairs."""
    items = rng.sample(LETTERS, 5) if rng.random() < 0.5 else rng.sample(WORDS, 4)
    shown = " ".join(items)
    question = rng.choice(
        (f"Turn this list round: {shown}.", f"Say {shown} from back to front.", f"What is {shown} in reverse order?")
    )
    back = items[::-1]
    n = len(items)
    if items[0][0] <= "m":
        steps = "From the end: " + ", ".join(f"{n - i} {x}" for i, x in enumerate(back)) + "."
    else:
        pairs = [f"{items[i]} with {back[i]}" for i in range(n // 2)]
        middle = f", {items[n // 2]} stays" if n % 2 else ""
        steps = f"Swap {' and '.join(pairs)}{middle}."
    return Draft(question, f"{n} items, {voice.link} I walk back. {steps}", " ".join(back))


EXTREME_QUESTIONS = 4 * (perm(90, 4) + perm(90, 5))


def extreme(rng: Random, voice: Voice) -> Draft:
    """The greatest or least of four or five two-digit numbers, with the best one so far at every step."""
    items = rng.sample(range(10, 100), rng.choice((4, 5)))
    most = rng.random() < 0.5
    shown = ", ".join(map(str, items))
    word = "biggest" if most else "least"
    question = rng.choice((f"Find the {word} of {shown}.", f"Here are some numbers: {shown}. Which is the {word}?"))
    best, steps = items[0], [f"Hold {items[0]}"]
    for item in items[1:]:
        wins = item > best if most else item < best
        if wins:
            steps.append(f"{item} beats {best}" if best % 2 else f"{item} is better, drop {best}")
            best = item
        else:
            steps.append(f"{item} no" if item % 2 else f"{item} loses to {best}")
    return Draft(question, "; ".join(steps) + f", {voice.link} {best} stays.", str(best))
