"""Sums, differences, comparisons and number series."""

from random import Random

from slipstream.pocket.kinds import Draft
from slipstream.pocket.wording import Voice

THINGS = ["apples", "books", "cards", "coins", "keys", "nuts", "pears", "pens", "shells", "stamps"]


def roughly(a: int, b: int, sign: int) -> str:
    """The sum or difference of both numbers rounded to tens (5 up)."""
    x, y = (a + 5) // 10 * 10, (b + 5) // 10 * 10
    return f"Roughly {x}{'+' if sign > 0 else '-'}{y}={x + sign * y}."


ADD_QUESTIONS = 78 * 78 * (2 + 2 * len(THINGS))


def add(rng: Random, voice: Voice) -> Draft:
    """Two numbers of 12 … 89. A second number that ends in 7, 8, 9 is rounded up; else by the parity of the first."""
    a, b = rng.randint(12, 89), rng.randint(12, 89)
    thing = rng.choice(THINGS)
    question = rng.choice(
        (
            f"What is {a} + {b}?",
            f"Add {a} and {b}.",
            f"I had {a} {thing} and got {b} more. How many now?",
            f"One box holds {a} {thing}, another {b}. How many in all?",
        )
    )
    total, ones, tens = a + b, b % 10, b - b % 10
    if ones >= 7:
        up = tens + 10
        steps = f"{b} is near {up}, {up - b} short. {a}+{up}={a + up}, {voice.link} {a + up}-{up - b}={total}."
    elif a % 2:
        steps = f"{b} is {tens} and {ones}. {a}+{tens}={a + tens}, {voice.link} {a + tens}+{ones}={total}."
    else:
        low = a % 10 + ones
        carry = f"write {low - 10}, carry 1" if low > 9 else "no carry"
        high = f"{a // 10}+{b // 10}+1" if low > 9 else f"{a // 10}+{b // 10}"
        steps = f"Ones: {a % 10}+{ones}={low}, {carry}. Tens: {high}={total // 10}, {voice.link} {total}."
    if total % 2 == 0:
        steps += f" Check: {total}-{a}={b}."
    return Draft(question, f"{roughly(a, b, 1)} {steps}", str(total))


SUBTRACT_QUESTIONS = sum(91 - b for b in range(12, 90)) * (2 + 2 * len(THINGS))


def subtract(rng: Random, voice: Voice) -> Draft:
    """Two numbers of 12 … 95 at least 5 apart; worked by rounding, by borrowing or digit by digit."""
    b = rng.randint(12, 89)
    a = rng.randint(b + 5, 95)
    thing = rng.choice(THINGS)
    question = rng.choice(
        (
            f"What is {a} - {b}?",
            f"Take {b} from {a}.",
            f"I had {a} {thing} and gave {b} away. How many are left?",
            f"There were {a} {thing}. Now {b} are gone. How many remain?",
        )
    )
    rest, ones = a - b, b % 10
    if ones >= 7:
        up = b - ones + 10
        steps = f"Take {up}, {voice.link} give {up - b} back. {a}-{up}={a - up}, {a - up}+{up - b}={rest}."
    elif a % 10 < ones:
        steps = (
            f"Ones: {a % 10} is under {ones}, borrow. {a % 10 + 10}-{ones}={rest % 10}. "
            f"Tens: {a // 10 - 1}-{b // 10}={rest // 10}, {voice.link} {rest}."
        )
    else:
        steps = f"No borrow: {a % 10}-{ones}={rest % 10} and {a // 10}-{b // 10}={rest // 10}, {voice.link} {rest}."
    if rest % 2 == 0:
        steps += f" Check: {rest}+{b}={a}."
    return Draft(question, f"{roughly(a, b, -1)} {steps}", str(rest))


COMPARE_QUESTIONS = 900 * 899 * 4


def compare(rng: Random, voice: Voice) -> Draft:
    """The larger or smaller of two three-digit numbers, often with equal leading digits; then how far apart."""
    a = rng.randint(100, 999)
    same = rng.choice((0, 1, 2))
    b = a
    while b == a:
        b = {0: rng.randint(100, 999), 1: a - a % 100 + rng.randrange(100), 2: a - a % 10 + rng.randrange(10)}[same]
    larger = rng.random() < 0.5
    word = "larger" if larger else "smaller"
    question = rng.choice((f"Which is {word}, {a} or {b}?", f"Name the {word} one of {a} and {b}."))
    places, steps = ("Hundreds", "Tens", "Ones"), []
    for place, x, y in zip(places, str(a), str(b), strict=True):
        if x != y:
            more = max(x, y)
            steps.append(f"{place}: {x} and {y}, {more} is more, {voice.link} {max(a, b)} is above {min(a, b)}.")
            break
        steps.append(f"{place}: both {x}." if int(x) % 2 else f"{place}: {x} and {y}, a tie.")
    value = max(a, b) if larger else min(a, b)
    steps.append("We want the top one." if larger else "We want the low one.")
    return Draft(question, " ".join(steps), str(value))


SERIES_QUESTIONS = 60 * 8 * 2 * 3


def series(rng: Random, voice: Voice) -> Draft:
    """Four terms of a rising or falling arithmetic progression with step 2 … 9; the next two are wanted."""
    step = rng.randint(2, 9)
    start = rng.randint(1, 60)
    sign = rng.choice((1, -1))
    first = start if sign > 0 else start + 5 * step
    terms = [first + sign * step * i for i in range(6)]
    shown = ", ".join(map(str, terms[:4]))
    question = rng.choice(
        (f"Which two numbers come after {shown}?", f"Go on with two more: {shown}.", f"{shown}: what are the next two?")
    )
    op, back = ("+", "-") if sign > 0 else ("-", "+")
    t = terms
    if step % 2:
        steps = f"{max(t[:2])}-{min(t[:2])}={step} and {max(t[2:4])}-{min(t[2:4])}={step}."
    else:
        steps = f"The gap: {max(t[:2])}-{min(t[:2])}={step}, for {t[1]}{back}{step}={t[0]}."
    trend = "Up" if sign > 0 else "Down"
    steps += f" {trend} by {step}, {voice.link} {t[3]}{op}{step}={t[4]} and {t[4]}{op}{step}={t[5]}."
    return Draft(question, steps, f"{t[4]}, {t[5]}")
