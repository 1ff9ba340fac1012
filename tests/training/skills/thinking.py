"""Sums of three numbers, which take a thought: two sums of two numbers, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.training.dialogue import (
    Exchange,
    Skill,
    Split,
    Thread,
    Tools,
    draw,
    split_of,
)
from tests.training.skills.sums import pair_key
from tests.training.words import compose

if TYPE_CHECKING:
    from random import Random

QUESTIONS = (
    "What is {a} + {b} + {c}?",
    "What is {a} + {b} + {c}?",
    "What's {a} + {b} + {c}?",
    "{a} + {b} + {c}",
    "{a} + {b} + {c} = ?",
    "{a}+{b}+{c}",
    "What is {a}+{b}+{c}?",
    "What is {a} plus {b} plus {c}?",
    "How much is {a} + {b} + {c}?",
    "How much is {a} plus {b} plus {c}?",
    "Add {a}, {b} and {c}.",
    "What is the sum of {a}, {b} and {c}?",
    "Calculate {a} + {b} + {c}.",
    "I have {a} apples, {b} pears and {c} plums. How many do I have?",
)


def write(rng: Random, split: Split) -> Thread:
    """Ask for the sum of three numbers. Held out are the pairs that `sums` holds out, as steps."""
    a, b, c = draw(rng, split, _three_numbers, _first_pair_key)
    question = compose(rng, QUESTIONS, a=a, b=b, c=c)
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
    "think",
    weight=0.0,
    write=write,
    thought="I add them one by one.",
    tools=Tools.WITHOUT,
    thinks=True,
)
