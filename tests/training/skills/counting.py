"""Counting up, counting down, and counting the things in a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from tests.training.dialogue import Exchange, Skill, Split, Thread, draw
from tests.training.words import NOUNS, compose, phrases

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

UP = phrases(
    """
    Count from {first} to {last}. | Count from {first} up to {last}. |
    Count up from {first} to {last}. | Can you count from {first} to {last}? |
    Please count from {first} to {last}. | Count {first} to {last}. |
    List the numbers from {first} to {last}. | Write the numbers from {first} to {last}. |
    Give me the numbers between {first} and {last}.
    """
)
UP_FROM_ONE = ("Count to {last}.", "Can you count to {last}?", "Count up to {last}.")
DOWN = (
    "Count down from {first} to {last}.",
    "Count backwards from {first} to {last}.",
    "Count back from {first} to {last}.",
    "Can you count down from {first} to {last}?",
)
ITEMS = (
    "Count the words: {items}",
    "How many words are there? {items}",
    "How many words are in this list: {items}",
    "Count these: {items}",
    "Count the items: {items}",
    "How many things are in this list? {items}",
)


class Range(msgspec.Struct, frozen=True):
    """Numbers to say, both ends included; down where `first` is the larger one."""

    first: int
    last: int

    def text(self) -> str:
        """The numbers, as the model should write them."""
        step = 1 if self.first <= self.last else -1
        return ", ".join(str(n) for n in range(self.first, self.last + step, step))


def write(rng: Random, split: Split) -> Thread:
    """Ask for one count. Held out are ranges above one, by direction, and lists of items."""
    if rng.random() < 0.2:
        items = draw(rng, split, _items, lambda words: f"items {' '.join(words)}")
        question = compose(rng, ITEMS, items=rng.choice((" ", ", ")).join(items))
        return (Exchange(question, _counted(items)),)
    numbers = draw(rng, split, _range, _range_key)
    if numbers.first > numbers.last:
        templates = DOWN
    elif numbers.first == 1 and rng.random() < 0.5:
        templates = UP_FROM_ONE
    else:
        templates = UP
    question = compose(rng, templates, first=numbers.first, last=numbers.last)
    return (Exchange(question, numbers.text()),)


def _range(rng: Random) -> Range:
    first = rng.choice((1, rng.randint(0, 20), rng.randint(0, 99), rng.randint(0, 120)))
    longest = rng.choice((10, 10, 10, 20, 20, 30))
    if rng.random() < 0.02:
        longest = 100
    last = first + rng.randint(1, longest)
    return Range(last, first) if rng.random() < 0.2 else Range(first, last)


def _range_key(numbers: Range) -> str | None:
    """The key of a range; people mostly count from or to one, and those ranges are few."""
    if min(numbers.first, numbers.last) <= 1:
        return None
    return f"count {numbers.first} {numbers.last}"


def _items(rng: Random) -> tuple[str, ...]:
    return tuple(rng.sample(NOUNS, rng.randint(1, 10)))


def _counted(items: Sequence[str]) -> str:
    """Count step by step: a model this small cannot count a list in one step."""
    numbered = ", ".join(f"{number} {item}" for number, item in enumerate(items, start=1))
    return f"{numbered}. I count {len(items)}."


COUNTING = Skill("counting", weight=2.0, write=write, thought="I count.", floor=0.9)
