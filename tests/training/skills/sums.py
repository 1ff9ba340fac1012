"""Sums of two numbers below a hundred, and of three, which take a thought.

The thought is two sums of two numbers, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.training.dialogue import Exchange, Skill, Split, Thread, Tools, draw, split_of
from tests.training.words import compose, phrases

if TYPE_CHECKING:
    from random import Random

QUESTIONS = phrases(
    """
    What is {a} + {b}? | What is {a} + {b}? | What is {a} plus {b}? | What's {a} + {b}? |
    {a} + {b} = ? | {a} + {b} = | {a} + {b} | {a}+{b} | What is {a}+{b}? | What's {a}+{b}? |
    What's {a} plus {b}? | {a}+{b}=? | {a} plus {b} | How much is {a} + {b}? |
    How much is {a} plus {b}? | What is the sum of {a} and {b}? | Add {a} and {b}. |
    Add {b} to {a}. | Calculate {a} + {b}. | Compute {a} + {b}. | Can you add {a} and {b}? |
    Tell me {a} plus {b}. | What do {a} and {b} make? |
    I have {a} apples and get {b} more. How many do I have? |
    There are {a} cats and {b} dogs. How many animals are there?
    """
)


def write(rng: Random, split: Split) -> Thread:
    """Ask for one sum. Held out are unordered pairs of two-digit numbers."""
    if split is Split.TRAIN and rng.random() < 0.25:
        a_max, b_max = rng.choice(((9, 9), (9, 99), (99, 9)))
        a, b = rng.randint(0, a_max), rng.randint(0, b_max)
    else:
        a, b = draw(rng, split, two_numbers, pair_key)
    question = compose(rng, QUESTIONS, a=a, b=b)
    # The question is repeated first: whatever the phrasing, the sum then follows the same tokens.
    return (Exchange(question, f"{a} + {b} = {a + b}."),)


def two_numbers(rng: Random) -> tuple[int, int]:
    return rng.randint(10, 99), rng.randint(10, 99)


def pair_key(pair: tuple[int, int]) -> str:
    """The same for both orders: knowing 12 + 34 would give 34 + 12 away."""
    return f"sum {min(pair)} {max(pair)}"


SUMS = Skill("sums", 2.8, write, "I add two numbers.", floor=0.9, tools=Tools.WITHOUT)


QUESTIONS_OF_THREE = phrases(
    """
    What is {a} + {b} + {c}? | What is {a} + {b} + {c}? | What's {a} + {b} + {c}? |
    {a} + {b} + {c} | {a} + {b} + {c} = ? | {a}+{b}+{c} | What is {a}+{b}+{c}? |
    What is {a} plus {b} plus {c}? | How much is {a} + {b} + {c}? |
    How much is {a} plus {b} plus {c}? | Add {a}, {b} and {c}. |
    What is the sum of {a}, {b} and {c}? | Calculate {a} + {b} + {c}. |
    I have {a} apples, {b} pears and {c} plums. How many do I have?
    """
)


def write_three(rng: Random, split: Split) -> Thread:
    """Ask for the sum of three numbers. Held out are the pairs that `write` holds out, as steps."""
    a, b, c = draw(rng, split, _three_numbers, _first_pair_key)
    question = compose(rng, QUESTIONS_OF_THREE, a=a, b=b, c=c)
    steps = f"{a} + {b} = {a + b}. {a + b} + {c} = {a + b + c}."
    return (Exchange(question, f"{a} + {b} + {c} = {a + b + c}.", thinking=steps),)


def _three_numbers(rng: Random) -> tuple[int, int, int]:
    """Draw three numbers of which no sum of two is held out but, perhaps, that of the first."""
    while True:
        most = rng.choice((9, 49, 99, 99))
        a, b, c = (rng.randint(1, most) for _ in range(3))
        if split_of(pair_key((a + b, c))) is Split.TRAIN:
            return a, b, c


def _first_pair_key(numbers: tuple[int, int, int]) -> str:
    a, b, _ = numbers
    return pair_key((a, b))


THINKING = Skill(
    "think", 0.0, write_three, "I add them one by one.", tools=Tools.WITHOUT, thinks=True
)
