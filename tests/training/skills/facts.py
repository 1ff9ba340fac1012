"""Colours and animals: the few things that the model knows about the world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.training.dialogue import Exchange, Skill, Split, Thread, draw
from tests.training.words import article, compose, phrases, wording_key

if TYPE_CHECKING:
    from random import Random

COLOUR_OF = {
    "the sky": "blue", "the sea": "blue", "the ocean": "blue", "grass": "green", "snow": "white",
    "milk": "white", "coal": "black", "the night": "black", "the sun": "yellow",
    "a banana": "yellow", "a lemon": "yellow", "blood": "red", "a strawberry": "red",
    "a tomato": "red", "a cherry": "red", "a fire engine": "red", "a carrot": "orange",
    "an orange": "orange", "a pumpkin": "orange", "chocolate": "brown", "coffee": "brown",
    "wood": "brown", "a leaf": "green", "a frog": "green", "a cucumber": "green",
    "an elephant": "grey", "a mouse": "grey", "a flamingo": "pink", "a pig": "pink",
    "a swan": "white", "a raven": "black", "a polar bear": "white", "a plum": "purple",
    "a canary": "yellow", "a fox": "red", "a dolphin": "grey", "salt": "white", "gold": "yellow",
}  # fmt: skip
COLOUR_ASKED = phrases(
    """
    What colour is {thing}? | What colour is {thing}? | What color is {thing}? |
    Which colour is {thing}? | What is the colour of {thing}? | What is the color of {thing}? |
    Tell me the colour of {thing}. | Do you know what colour {thing} is?
    """
)

SOUND_OF = {
    "cow": "moo", "dog": "woof", "cat": "meow", "sheep": "baa", "duck": "quack", "pig": "oink",
    "horse": "neigh", "lion": "roar", "frog": "ribbit", "bee": "buzz", "snake": "hiss",
    "owl": "hoot", "mouse": "squeak", "rooster": "cock-a-doodle-doo", "wolf": "howl",
    "crow": "caw", "chick": "cheep", "turkey": "gobble",
}  # fmt: skip
SOUND_ASKED = (
    "What does {animal} say?",
    "What sound does {animal} make?",
    "Which sound does {animal} make?",
    "What noise does {animal} make?",
    "How does {animal} sound?",
)

LEGS_OF = {
    "dog": 4, "cat": 4, "horse": 4, "cow": 4, "sheep": 4, "pig": 4, "lion": 4, "elephant": 4,
    "frog": 4, "spider": 8, "octopus": 8, "ant": 6, "bee": 6, "fly": 6, "beetle": 6, "bird": 2,
    "duck": 2, "chicken": 2, "ostrich": 2, "snake": 0, "fish": 0, "worm": 0, "crab": 10,
}  # fmt: skip
LEGS_ASKED = (
    "How many legs does {animal} have?",
    "How many legs has {animal}?",
    "Do you know how many legs {animal} has?",
    "Tell me how many legs {animal} has.",
)

YOUNG_OF = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal",
    "pig": "piglet", "duck": "duckling", "lion": "cub", "bear": "cub", "goat": "kid",
    "chicken": "chick", "frog": "tadpole", "deer": "fawn", "goose": "gosling", "kangaroo": "joey",
    "swan": "cygnet", "owl": "owlet",
}  # fmt: skip
YOUNG_ASKED = (
    "What is a baby {animal} called?",
    "What is a young {animal} called?",
    "What do you call a baby {animal}?",
    "What is the name for a baby {animal}?",
)

CAN_FLY = {
    "bird": True, "eagle": True, "bee": True, "owl": True, "duck": True, "bat": True,
    "butterfly": True, "swan": True, "dog": False, "cat": False, "fish": False, "cow": False,
    "penguin": False, "ostrich": False, "horse": False, "pig": False, "elephant": False,
    "snake": False,
}  # fmt: skip
FLY_ASKED = ("Can {animal} fly?", "Is {animal} able to fly?", "Do you know if {animal} can fly?")

EXAMPLES = {
    "a colour": "Blue is a colour.", "three colours": "Red, yellow and blue.",
    "some colours": "Red, yellow and blue.", "an animal": "A fox is an animal.",
    "three animals": "A cat, a dog and a horse.", "some animals": "A cat, a dog and a horse.",
    "a bird": "An owl is a bird.", "a fish": "A shark is a fish.",
    "an insect": "A bee is an insect.", "a farm animal": "A cow is a farm animal.",
    "a red fruit": "A cherry is a red fruit.", "a yellow fruit": "A banana is a yellow fruit.",
    "an animal that can fly": "An eagle can fly.", "an animal that can swim": "A duck can swim.",
}  # fmt: skip
EXAMPLE_ASKED = phrases(
    """
    Name {kind}. | Can you name {kind}? | Tell me {kind}. | Give me {kind}. | Do you know {kind}?
    """
)


def write_colour(rng: Random, split: Split) -> Thread:
    """Ask for the colour of a thing. Held out are wordings."""
    return (draw(rng, split, _colour, lambda it: wording_key(it.user)),)


def write_animal(rng: Random, split: Split) -> Thread:
    """Ask something about an animal. Held out are wordings."""
    question = rng.choice((_sound, _legs, _young, _fly, _example))
    return (draw(rng, split, question, lambda it: wording_key(it.user)),)


def _colour(rng: Random) -> Exchange:
    thing, colour = rng.choice(tuple(COLOUR_OF.items()))
    answer = f"{thing[0].upper()}{thing[1:]} is {colour}."
    return Exchange(compose(rng, COLOUR_ASKED, thing=thing), answer)


def _sound(rng: Random) -> Exchange:
    animal, sound = rng.choice(tuple(SOUND_OF.items()))
    subject = article(animal)
    return Exchange(
        compose(rng, SOUND_ASKED, animal=subject), f"{subject.capitalize()} says {sound}."
    )


def _legs(rng: Random) -> Exchange:
    animal, legs = rng.choice(tuple(LEGS_OF.items()))
    subject = article(animal)
    answer = f"{subject.capitalize()} has {legs or 'no'} legs."
    return Exchange(compose(rng, LEGS_ASKED, animal=subject), answer)


def _young(rng: Random) -> Exchange:
    animal, young = rng.choice(tuple(YOUNG_OF.items()))
    answer = f"A baby {animal} is called {article(young)}."
    return Exchange(compose(rng, YOUNG_ASKED, animal=animal), answer)


def _fly(rng: Random) -> Exchange:
    animal, flies = rng.choice(tuple(CAN_FLY.items()))
    subject = article(animal)
    answer = f"Yes, {subject} can fly." if flies else f"No, {subject} cannot fly."
    return Exchange(compose(rng, FLY_ASKED, animal=subject), answer)


def _example(rng: Random) -> Exchange:
    kind, answer = rng.choice(tuple(EXAMPLES.items()))
    return Exchange(compose(rng, EXAMPLE_ASKED, kind=kind), answer)


COLOURS = Skill("colours", weight=0.8, write=write_colour, thought="I know this colour.")
ANIMALS = Skill("animals", weight=1.0, write=write_animal, thought="I know this animal.")
