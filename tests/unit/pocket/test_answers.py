"""Every kind's answer, recomputed from the words of the prompt alone."""

import re
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from slipstream.pocket.curriculum import KINDS, Task, generate

WEEK = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
EACH = {
    "days weeks": 7,
    "minutes hours": 60,
    "hours days": 24,
    "eggs dozen": 12,
    "inches feet": 12,
    "seconds minutes": 60,
    "months years": 12,
    "legs spiders": 8,
}
CHANGE = re.compile(
    r"(?:How many (?P<s1>\w+) are|Turn|count) (?P<n>\d+) (?P<l>\w+)(?: into (?P<s2>\w+)|.*in (?P<s3>\w+))?"
)


def numbers(prompt: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", prompt)]


def difference(prompt: str) -> str:
    a, b = numbers(prompt)
    return str(abs(a - b))


def compared(prompt: str) -> str:
    return str(max(numbers(prompt)) if "larger" in prompt else min(numbers(prompt)))


def extreme(prompt: str) -> str:
    return str(max(numbers(prompt)) if "biggest" in prompt else min(numbers(prompt)))


def continued(prompt: str) -> str:
    a, b, c, d = numbers(prompt)
    assert b - a == c - b == d - c
    return f"{2 * d - c}, {3 * d - 2 * c}"


def in_order(prompt: str) -> str:
    items = re.search(r"(\b\w, )+\w\b", prompt.replace("Hi, I am", ""))
    assert items
    return ", ".join(sorted(items[0].split(", "), reverse="from high to low" in prompt))


def reversed_list(prompt: str) -> str:
    items = re.search(r"list round: (.+?)\.|Say (.+?) from back|What is (.+?) in reverse", prompt)
    assert items
    return " ".join(next(g for g in items.groups() if g).split(" ")[::-1])


def counted(prompt: str) -> str:
    for pattern in (r"is (\w) in (\w+)\?", r"the letter (\w) in the word (\w+)\."):
        if found := re.search(pattern, prompt):
            return str(found[2].count(found[1]))
    word, letter = re.search(r"Look at (\w+)\.", prompt), re.search(r"see (\w)\?", prompt)
    assert word
    assert letter
    return str(word[1].count(letter[1]))


def shifted(prompt: str) -> str:
    letters = re.search(r"\b[a-z]( [a-z]){3}\b", prompt)
    way = re.search(r"(\d) (on|back)", prompt)
    assert letters
    assert way
    by = int(way[1]) * (1 if way[2] == "on" else -1)
    return " ".join(chr(ord(c) + by) for c in letters[0].split())


def clocked(prompt: str) -> str:
    start, wait = re.search(r"(\d+:\d\d)", prompt), re.search(r"(\d+) minutes", prompt)
    assert start
    assert wait
    end = datetime.strptime(start[1], "%H:%M") + timedelta(minutes=int(wait[1]))
    return f"{end.hour}:{end.minute:02d}"


def dated(prompt: str) -> str:
    (day,) = [d for d in WEEK if d in prompt]
    return WEEK[(WEEK.index(day) + numbers(prompt)[0]) % 7]


def converted(prompt: str) -> str:
    found = CHANGE.search(prompt)
    assert found
    small = found["s1"] or found["s2"] or found["s3"]
    return str(int(found["n"]) * EACH[f"{small} {found['l']}"])


def priced(prompt: str) -> str:
    if "I buy" in prompt:
        n, c, m, d = numbers(prompt)
    else:
        c, d, n, m = numbers(prompt)
    return str(n * c + m * d)


def looked_up(prompt: str) -> str:
    rows = re.findall(r"(\w+) has (\d+) (\w+)", prompt)
    assert len(rows) == 3
    count = {p: int(n) for p, n, _ in rows}
    return max(count, key=lambda p: count[p])


def computed(text: str) -> int:
    """Left to right: `12x3`, `7+8+1`, `90-37`."""
    first, *rest = re.findall(r"\d+|[-+x]", text)
    value = int(first)
    for op, n in zip(rest[::2], rest[1::2], strict=True):
        value = {"+": value + int(n), "-": value - int(n), "x": value * int(n)}[op]
    return value


SOLVERS: dict[str, Callable[[str], str]] = {
    "add": lambda prompt: str(sum(numbers(prompt))),
    "subtract": difference,
    "compare": compared,
    "series": continued,
    "sort": in_order,
    "reverse": reversed_list,
    "extreme": extreme,
    "count": counted,
    "shift": shifted,
    "clock": clocked,
    "weekday": dated,
    "convert": converted,
    "price": priced,
    "lookup": looked_up,
}

TASKS = generate(200 * len(KINDS), seed=5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_what_the_prompt_asks_for(kind: str) -> None:
    for task in (t for t in TASKS if t.kind == kind):
        value = SOLVERS[kind](task.prompt)
        said = re.fullmatch(r"It is (.+), \w+\.", task.answer)
        assert (said[1] if said else task.answer) == value, task


@pytest.mark.parametrize("kind", KINDS)
def test_the_reasoning_reaches_the_answer_and_its_sums_are_right(kind: str) -> None:
    for task in (t for t in TASKS if t.kind == kind):
        assert SOLVERS[kind](task.prompt) in task.thinking.rsplit(". ", 1)[-1]
        for left, right in re.findall(r"(\d+(?:[-+x]\d+)+)=(\d+)", task.thinking):
            assert computed(left) == int(right), task


def test_polite_prompts_get_a_sentence() -> None:
    def polite(task: Task) -> bool:
        return "Please" in task.prompt or "Thanks" in task.prompt

    assert {polite(t) for t in TASKS} == {True, False}
    assert all(t.answer.startswith("It is ") == polite(t) for t in TASKS)
