"""Clock times, days of the week, units, prices, and who has what."""

from math import perm
from random import Random

from slipstream.pocket.kinds import Draft
from slipstream.pocket.kinds.numbers import THINGS
from slipstream.pocket.wording import NAMES, Voice

CLOCK_QUESTIONS = 3 * 22 * 60 * 86


def clock(rng: Random, voice: Voice) -> Draft:
    """A start of 00:00 … 21:59 and 10 … 95 minutes more."""
    hour, minute, wait = rng.randrange(22), rng.randrange(60), rng.randint(10, 95)
    start = f"{hour}:{minute:02d}"
    question = rng.choice(
        (
            f"It is {start}. What time is it in {wait} minutes?",
            f"The bus leaves at {start} and takes {wait} minutes. When does it arrive?",
            f"A film starts at {start} and runs {wait} minutes. When is it over?",
        )
    )
    total = minute + wait
    steps = f"The next hour is {60 - minute} off." if wait % 2 else f"From {start} on {wait} minutes."
    steps += f" Minutes: {minute}+{wait}={total}."
    if total >= 120:
        hour, total = hour + 2, total - 120
        steps += f" Two full hours, {total + 120}-120={total}, {voice.link} the hour is {hour}."
    elif total >= 60:
        hour, total = hour + 1, total - 60
        steps += f" Over 60: {total + 60}-60={total}, {voice.link} the hour is {hour}."
    else:
        steps += f" Under 60, {voice.link} the hour stays {hour}."
    return Draft(question, steps, f"{hour}:{total:02d}")


DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

WEEKDAY_QUESTIONS = 7 * 39 * 3


def weekday(rng: Random, voice: Voice) -> Draft:
    """The day 2 … 40 days on: whole weeks drop out, the rest is walked."""
    day, ahead = rng.randrange(7), rng.randint(2, 40)
    question = rng.choice(
        (
            f"Today is {DAYS[day]}. Which day is it in {ahead} days?",
            f"A trip starts on a {DAYS[day]} and ends {ahead} days later. On which day?",
            f"Name the day {ahead} days after {DAYS[day]}.",
        )
    )
    weeks, rest = divmod(ahead, 7)
    walk = [DAYS[(day + i) % 7] for i in range(rest + 1)]
    if weeks == 0:
        steps = f"{ahead} is under 7."
    elif ahead % 2:
        steps = f"7x{weeks}={7 * weeks}, {ahead}-{7 * weeks}={rest}."
    else:
        steps = f"Drop {weeks} weeks or {7 * weeks} days, {rest} left."
    steps += f" From {walk[0]}: {' '.join(walk[1:])}" if rest else f" Same day as {walk[0]}"
    return Draft(question, f"{steps}, {voice.link} stop.", walk[-1])


def digit_sum(number: int) -> str:
    """The sum of the digits, worked for two digits and more; an even last digit is named instead."""
    text = str(number)
    if number % 2 == 0 or len(text) == 1:
        return f"It ends in {text[-1]}."
    return f"Its digits {'+'.join(text)} make {sum(map(int, text))}."


UNITS = (("weeks", "days", 7), ("hours", "minutes", 60), ("days", "hours", 24), ("dozen", "eggs", 12))
MORE_UNITS = (("feet", "inches", 12), ("minutes", "seconds", 60), ("years", "months", 12), ("spiders", "legs", 8))

CONVERT_QUESTIONS = 3 * 38 * len(UNITS + MORE_UNITS)


def convert(rng: Random, voice: Voice) -> Draft:
    """2 … 39 of a large unit in a small one: tens and ones multiplied apart."""
    number = rng.randint(2, 39)
    large, small, factor = rng.choice(UNITS + MORE_UNITS)
    question = rng.choice(
        (
            f"How many {small} are {number} {large}?",
            f"Turn {number} {large} into {small}.",
            f"I count {number} {large}. What is that in {small}?",
        )
    )
    total, tens, ones = number * factor, number - number % 10, number % 10
    if tens and ones:
        a, b = tens * factor, ones * factor
        steps = f"{factor}x{tens}={a} and {factor}x{ones}={b}, {voice.link} {a}+{b}={total}."
    else:
        steps = f"{factor}x{number}, {voice.link} {total}."
    how = f"One is {factor} {small}." if number % 2 else f"I need {factor} for each."
    return Draft(question, f"{how} {steps} {digit_sum(total)}", str(total))


PRICE_QUESTIONS = 2 * perm(len(THINGS) - 1, 2) * 8**4


def price(rng: Random, voice: Voice) -> Draft:
    """Two goods, 2 … 9 of each at 2 … 9 coins: two products and their sum; the dearer product first."""
    first, second = rng.sample([t for t in THINGS if t != "coins"], 2)
    (n, c), (m, d) = [(rng.randint(2, 9), rng.randint(2, 9)) for _ in range(2)]
    question = rng.choice(
        (
            f"I buy {n} {first} for {c} coins each and {m} {second} for {d} each. What do I pay?",
            f"{first} cost {c}, {second} cost {d}. What is the price of {n} {first} and {m} {second}?",
        )
    )
    a, b = n * c, m * d
    parts = [f"{first} {n}x{c}={a}", f"{second} {m}x{d}={b}"]
    if c < d:
        parts.reverse()
    steps = f"{parts[0]}; {parts[1]}, {voice.link} {a}+{b}={a + b}. {digit_sum(a + b)}"
    return Draft(question, steps, str(a + b))


LOOKUP_QUESTIONS = perm(len(NAMES) - 1, 3) * perm(len(THINGS), 3) * perm(8, 3)


def lookup(rng: Random, voice: Voice) -> Draft:
    """Three people with 2 … 9 things each, all different: who has most."""
    people = rng.sample([n for n in NAMES if n != voice.name], 3)
    things, counts = rng.sample(THINGS, 3), rng.sample(range(2, 10), 3)
    table = ", ".join(f"{p} has {c} {t}" for p, c, t in zip(people, counts, things, strict=True))
    rows = ", ".join(f"{p} {c}" for p, c in zip(people, counts, strict=True))
    top, low = max(counts), min(counts)
    steps = f"{rows}. Most to least: {top}-{low}={top - low}, {voice.link} {top} wins."
    return Draft(f"{table}. Who has the most?", steps, people[counts.index(top)])
