"""Remembering, over other turns, what the user said before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.training.dialogue import Exchange, Skill, Split, Thread, draw
from tests.training.words import (
    COLOURS,
    NAMES,
    PET_NAMES,
    PETS,
    compose,
    person,
    phrases,
    wording_key,
)

if TYPE_CHECKING:
    from random import Random

NAME_TOLD = phrases(
    """
    My name is {name}. | My name is {name}. | Hello, my name is {name}. | Hi! My name is {name}. |
    Hi, I am {name}. | Hi, I'm {name}. | I am {name}. | I'm {name}. | You can call me {name}. |
    Call me {name}. | Hello! I'm {name}. Nice to meet you. | Good morning, my name is {name}. |
    My name is {name}. Please remember it. | Remember my name: {name}
    """
)
NAME_CHANGED = ("My name is now {name}.", "Actually, my name is {name}.", "No, call me {name}.")
NAME_ASKED = phrases(
    """
    What is my name? | What is my name? | What's my name? | Do you remember my name? | Who am I? |
    What was my name? | What did I say my name was? | Can you tell me my name? | Tell me my name. |
    Do you know my name? | What am I called?
    """
)
NAME_UNKNOWN = "You have not told me your name."

COLOUR_TOLD = (
    "My favourite colour is {colour}.",
    "My favorite color is {colour}.",
    "I like the colour {colour} best.",
    "The colour that I like best is {colour}.",
)
COLOUR_ASKED = (
    "What is my favourite colour?",
    "What is my favorite color?",
    "What's my favourite colour?",
    "Which colour do I like best?",
    "Do you remember my favourite colour?",
)

PET_TOLD = (
    "I have a {pet} named {name}.",
    "I have a {pet} called {name}.",
    "My {pet} is called {name}.",
    "My {pet}'s name is {name}.",
)
PET_ASKED = (
    "What is my {pet} called?",
    "What is my {pet}'s name?",
    "What is the name of my {pet}?",
    "Do you remember what my {pet} is called?",
)

THOUGHT = "I look back."


def write_name(rng: Random, split: Split) -> Thread:
    """State a name, ask for it later. Held out are names, in every phrasing."""
    if split is Split.TRAIN and rng.random() < 0.08:
        return (Exchange(compose(rng, NAME_ASKED), NAME_UNKNOWN),)
    name = _name(rng, split)
    told = Exchange(compose(rng, NAME_TOLD, name=name), f"Nice to meet you, {name}!")
    asked = [_name_asked(rng, name)]
    if rng.random() < 0.1:
        name = _name(rng, split)
        changed = compose(rng, NAME_CHANGED, name=name)
        asked += [Exchange(changed, f"Nice to meet you, {name}!"), _name_asked(rng, name)]
    return (told, *asked)


def write_colour(rng: Random, split: Split) -> Thread:
    """State a favourite colour, ask for it later. Held out are the questions' wordings."""
    colour = rng.choice(COLOURS)
    told = compose(rng, COLOUR_TOLD, colour=colour)
    asked = draw(rng, split, lambda it: compose(it, COLOUR_ASKED), wording_key)
    return (
        Exchange(told, f"{colour.capitalize()} is a nice colour."),
        Exchange(asked, f"Your favourite colour is {colour}."),
    )


def write_pet(rng: Random, split: Split) -> Thread:
    """State a pet's name, ask for it later. Held out are pairs of pet and name."""
    pet, name = draw(
        rng,
        split,
        lambda it: (it.choice(PETS), it.choice(PET_NAMES + NAMES)),
        lambda pair: f"pet {pair[0]} {pair[1]}",
    )
    return (
        Exchange(
            compose(rng, PET_TOLD, pet=pet, name=name), f"{name} is a lovely name for a {pet}."
        ),
        Exchange(compose(rng, PET_ASKED, pet=pet), f"Your {pet} is called {name}."),
    )


def _name(rng: Random, split: Split) -> str:
    return draw(rng, split, lambda it: person(it, known=0.6), lambda name: f"name {name}")


def _name_asked(rng: Random, name: str) -> Exchange:
    return Exchange(compose(rng, NAME_ASKED), f"Your name is {name}.")


RECALL = Skill("recall", weight=1.3, write=write_name, thought=THOUGHT, floor=0.9, subject="name")
RECALL_COLOUR = Skill(
    "recall_colour", weight=0.3, write=write_colour, thought=THOUGHT, subject="colour"
)
RECALL_PET = Skill("recall_pet", weight=0.4, write=write_pet, thought=THOUGHT, subject="pet")
