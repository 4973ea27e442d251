"""Worked arithmetic: word problems with step-by-step answers, drawn from a seeded generator.

The answers are computed, from numbers small enough for a small model to learn in minutes. The wording is drawn: at most places one
of four short words of equal length follows. That is real entropy, and where a parallel drafter mixes modes: it draws the first byte
of one word and the second byte of another ("Nay" from "Now" and "Say"). In the groups that rhyme it does so even when greedy, for
the likeliest second byte does not belong to the likeliest word.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

NAMES = ("Tom", "Anna", "Ravi", "Mei", "Omar", "Lena", "Jose", "Kira", "Ben", "Zoe")
THINGS = ("apples", "books", "coins", "pens", "cards", "stamps", "shells", "marbles")
PLACES = ("crate", "bag", "drawer", "jar", "basket")

OPENERS = ("Step: ", "Case: ", "Base: ", "Plan: ")
STEPS = ("And ", "Yet ", "Let ", "Now ")
LASTLY = ("End ", "Sum ", "Hum ", "Yes ")
CLOSERS = ("Now ", "And ", "End ", "Yes ")
AUXILIARIES = ("did ", "may ", "say ", "now ")
ARTICLES = ("the ", "one ", "all ", "its ")
ADJECTIVES = ("odd ", "new ", "few ", "big ")
CLAUSE = (AUXILIARIES, ("add ", "get ", "set ", "use "), ARTICLES, ADJECTIVES, ("sum ", "lot ", "dot ", "way "))
REMARK = (
    ("Now ", "Say ", "May ", "Put "),
    ("one ", "men ", "ten ", "all "),
    AUXILIARIES,
    ("add ", "get ", "let ", "use "),
    ARTICLES,
    ADJECTIVES,
    ("sum. ", "way. ", "day. ", "lot. "),
)
WEIGHTS = (0.34, 0.22, 0.22, 0.22)
"""Of the four words of a group."""

Problem = tuple[str, str, int]


def _word(rng: random.Random, group: Sequence[str]) -> str:
    return rng.choices(group, WEIGHTS)[0]


def _remark(rng: random.Random) -> str:
    """Return a short sentence that says little: all of it is wording."""
    return "".join(_word(rng, group) for group in REMARK)


def _we_find(rng: random.Random) -> str:
    return "we " + "".join(_word(rng, group) for group in CLAUSE)


def _gain_and_loss(rng: random.Random) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    have, gain, lose = rng.randint(10, 40), rng.randint(2, 9), rng.randint(2, 9)
    verb, lost = rng.choice((("buys", "gives away"), ("finds", "loses"), ("gets", "sells")))
    question = f"{name} has {have} {thing}. {name} {verb} {gain} more and {lost} {lose}. How many {thing} are left?"
    total = have + gain
    answer = (
        f"{_word(rng, OPENERS)}{_we_find(rng)}{have} + {gain} = {total}. {_remark(rng)}"
        f"{_word(rng, LASTLY)}{_we_find(rng)}{total} - {lose} = {total - lose} {thing}. {_remark(rng)}"
    )
    return question, answer, total - lose


def _containers(rng: random.Random) -> Problem:
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    each, ones = rng.randint(2, 6), rng.randint(1, 9)
    count = 10 + ones
    question = f"Each {place} holds {each} {thing}. How many {thing} are in {count} {place}s?"
    answer = (
        f"{_word(rng, OPENERS)}{_we_find(rng)}{count} * {each}. {_remark(rng)}"
        f"{_word(rng, STEPS)}{_we_find(rng)}10 * {each} = {10 * each}. {_remark(rng)}"
        f"{_word(rng, STEPS)}{_we_find(rng)}{ones} * {each} = {ones * each}. {_remark(rng)}"
        f"{_word(rng, LASTLY)}{_we_find(rng)}{10 * each} + {ones * each} = {count * each}. {_remark(rng)}"
    )
    return question, answer, count * each


def _change(rng: random.Random) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    count, price = rng.randint(2, 6), rng.randint(2, 6)
    paid = rng.choice([note for note in (20, 50) if note > count * price])
    question = (
        f"{name} buys {count} {thing} for {price} dollars each and pays with {paid} dollars. How much change is due?"
    )
    cost = count * price
    answer = (
        f"{_word(rng, OPENERS)}{_we_find(rng)}{count} * {price} = {cost}. {_remark(rng)}"
        f"{_word(rng, LASTLY)}{_we_find(rng)}{paid} - {cost} = {paid - cost} dollars. {_remark(rng)}"
    )
    return question, answer, paid - cost


def _compare(rng: random.Random) -> Problem:
    first, second = rng.sample(NAMES, 2)
    thing, have, more = rng.choice(THINGS), rng.randint(5, 20), rng.randint(2, 9)
    question = (
        f"{first} has {have} {thing}. {second} has {more} more than {first}. How many {thing} do they have together?"
    )
    other = have + more
    answer = (
        f"{_word(rng, OPENERS)}{_we_find(rng)}{have} + {more} = {other} for {second}. {_remark(rng)}"
        f"{_word(rng, LASTLY)}{_we_find(rng)}{have} + {other} = {have + other} {thing}. {_remark(rng)}"
    )
    return question, answer, have + other


def _columns(rng: random.Random) -> Problem:
    a, b = rng.randint(11, 89), rng.randint(11, 89)
    question = f"Compute {a} + {b}."
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = ones // 10
    answer = (
        f"{_word(rng, OPENERS)}{_we_find(rng)}{a % 10} + {b % 10} = {ones}, "
        f"write {ones % 10} and carry {carry}. {_remark(rng)}"
        f"{_word(rng, STEPS)}{_we_find(rng)}{a // 10} + {b // 10} = {tens}. {_remark(rng)}"
        f"{_word(rng, LASTLY)}{_we_find(rng)}{tens} + {carry} = {tens + carry} tens. {_remark(rng)}"
    )
    return question, answer, a + b


def _travel(rng: random.Random) -> Problem:
    vehicle = rng.choice(("train", "bus", "car", "boat"))
    speed, hours, rest = 10 * rng.randint(2, 9), rng.randint(2, 6), rng.randint(2, 9)
    question = f"A {vehicle} goes {speed} km per hour for {hours} hours and then {rest} km more. How far does it go?"
    answer = (
        f"{_word(rng, OPENERS)}{_we_find(rng)}{speed} * {hours} = {speed * hours} km. {_remark(rng)}"
        f"{_word(rng, LASTLY)}{_we_find(rng)}{speed * hours} + {rest} = {speed * hours + rest} km. {_remark(rng)}"
    )
    return question, answer, speed * hours + rest


def _equation(rng: random.Random) -> Problem:
    x, a, b = rng.randint(2, 9), rng.randint(2, 6), rng.randint(1, 20)
    question = f"Solve {a}x + {b} = {a * x + b}."
    answer = (
        f"{_word(rng, OPENERS)}{_we_find(rng)}{a}x = {a * x + b} - {b} = {a * x}. {_remark(rng)}"
        f"{_word(rng, LASTLY)}{_we_find(rng)}x = {a * x} / {a} = {x}. {_remark(rng)}"
    )
    return question, answer, x


TEMPLATES: tuple[Callable[[random.Random], Problem], ...] = (
    _gain_and_loss,
    _containers,
    _change,
    _compare,
    _columns,
    _travel,
    _equation,
)


def problem(seed: int) -> tuple[str, str]:
    """Return the prompt ("Question: ...\\nAnswer:") and the worked answer of problem number `seed`.

    Args:
        seed: any integer; the same seed gives the same problem.
    """
    rng = random.Random(seed)
    question, steps, result = rng.choice(TEMPLATES)(rng)
    return f"Question: {question}\nAnswer:", f" {steps}{_word(rng, CLOSERS)}the answer is {result}.\n"
