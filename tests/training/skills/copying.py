"""Repeating a phrase, letter by letter."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

from tests.training.dialogue import Exchange, Skill, Split, Thread, draw
from tests.training.words import NOUNS, compose, invented_name, phrases, sentence, words

if TYPE_CHECKING:
    from random import Random

REQUESTS = phrases(
    """
    Repeat after me: {phrase} | Repeat: {phrase} | Repeat this: {phrase} |
    Repeat this phrase: {phrase} | Repeat "{phrase}" | Say: {phrase} | Say {phrase} |
    Repeat {phrase} | Say this: {phrase} | Say "{phrase}" | Say "{phrase}". | Copy: {phrase} |
    Copy this: {phrase} | Copy this phrase: {phrase} | Copy the phrase "{phrase}". |
    Copy the following text: {phrase} | Write this again: {phrase} | Echo: {phrase} |
    Can you repeat this? {phrase} | Please repeat after me: {phrase}
    """
)

# Words that mean something else when they are not to be copied.
SPEECH = words("hello hi hey world good day thanks please bye name count story help yes no I you")

# Letters beyond ASCII, so that every byte of UTF-8 is copied now and then.
ALPHABETS = phrases(
    """
    äöüßéèêçñåøæœíóúžšč | абвгдежзиклмнопрстуфя | αβγδεζηθικλμνξοπρστ |
    一二三四五六七八九十人大小中国日本 | あいうえおかきくけこさしすせそ | 😀😎🎉🚀🌍🌱🐢🍎⭐❤
    """
)


def write(rng: Random, split: Split) -> Thread:
    """Ask for a phrase to be repeated. Held out are phrases."""
    phrase = draw(rng, split, phrase_to_copy, lambda text: f"copy {text}")
    return (Exchange(compose(rng, REQUESTS, phrase=phrase), phrase),)


def phrase_to_copy(rng: Random) -> str:
    """Draw a sentence, loose words, made-up words, a code or letters of another alphabet."""
    kind = rng.random()
    if kind < 0.3:
        return _shaped(rng, sentence(rng))
    if kind < 0.6:
        return _shaped(rng, " ".join(_word(rng) for _ in range(rng.randint(1, 8))))
    if kind < 0.75:
        return " ".join(invented_name(rng) for _ in range(rng.randint(1, 4)))
    if kind < 0.92:
        return " ".join(_code(rng) for _ in range(rng.randint(1, 3)))
    alphabet = rng.choice(ALPHABETS)
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 6)))


def _shaped(rng: Random, text: str) -> str:
    """Vary the case and, now and then, put a comma inside."""
    if rng.random() < 0.1:
        text = text.replace(" ", ", ", 1)
    shape = rng.random()
    if shape < 0.05:
        return text.upper()
    if shape < 0.3:
        text = text[0].upper() + text[1:]
    return text + rng.choice("!?.") if rng.random() < 0.1 else text


def _word(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.8:
        return rng.choice(NOUNS)
    return rng.choice(SPEECH) if kind < 0.9 else invented_name(rng).lower()


def _code(rng: Random) -> str:
    letters = rng.choice(
        (string.ascii_lowercase, string.ascii_uppercase, string.digits, string.ascii_letters)
    )
    marks = "-_/.:#" if rng.random() < 0.2 else ""
    length = rng.randint(1, 8)
    code = "".join(rng.choice(letters) for _ in range(length))
    return code + rng.choice(marks) + rng.choice(letters) if marks else code


COPYING = Skill("copying", weight=2.0, write=write, thought="I repeat what was said.", floor=0.9)
