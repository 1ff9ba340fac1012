"""The words that conversations are drawn from, and small variations of wording."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random


def words(text: str) -> tuple[str, ...]:
    """Split a text at its spaces; long lists of words are more readable this way."""
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """Split a text at its bars."""
    return tuple(" ".join(part.split()) for part in text.split("|"))


NAMES = words(
    """
    Ada Adam Agnes Aisha Alan Alba Alex Ali Alice Amara Amir Amy Ana Andrea Anna Anton Aria Arthur
    Astrid Ben Bella Boris Bruno Carl Carla Carmen Cara Chen Chloe Clara Claude Cora Dan Dana Daniel
    David Dora Eddie Edgar Ella Elias Elif Elena Emil Emma Erik Esther Eva Farah Felix Fatima Finn
    Fiona Frank Freya Gabriel Gina Grace Greta Gustav Hana Hannah Harry Hassan Hector Heidi Helen
    Henry Hugo Ida Igor Ines Ingrid Iris Isaac Isla Ivan Ivy Jack Jakob James Jan Jane Jasmine Joan
    John Jonas Jose Julia Juno Kai Karen Karim Karl Kate Kenji Kira Kofi Lana Lars Laura Layla Lena
    Leo Lian Lila Linda Linus Lisa Liam Louis Lucia Lucy Luis Luna Mara Marco Maria Marie Mark Marta
    Max Maya Mei Mia Mika Milan Mina Mohamed Mona Moses Nadia Naomi Nina Nils Noah Nora Olga Oliver
    Omar Oscar Otto Pablo Paul Paula Pedro Peter Petra Philip Priya Quentin Rachel Raj Rania Ravi
    Rita Robert Rosa Ruby Ruth Sam Samir Sara Sasha Selma Simon Sofia Stella Susan Tara Theo Thomas
    Tina Tom Uma Una Ursula Vera Victor Viola Walter Wanda Wei Will Xavier Yara Yuki Yusuf Zara Zoe
    """
)

PET_NAMES = words(
    """
    Rex Bella Luna Max Milo Coco Rocky Daisy Buddy Ginger Shadow Pepper Biscuit Whiskers Tiger
    Smokey Patch Nugget Mango Olive Waffles Pickle Honey Hazel Pumpkin Socks Snowy Sparky Teddy
    Toffee Willow Ziggy Maple Muffin Peanut Pixel Cookie Cosmo Dusty Bandit
    """
)

PETS = ("dog", "cat", "horse", "rabbit", "parrot", "hamster", "goldfish", "turtle")

COLOURS = words("red blue green yellow orange purple pink black white brown grey gold")

NOUNS = words(
    """
    apple river mountain window garden bridge teacher letter morning winter kitchen bottle candle
    forest table chair pencil market village engine summer island doctor painter story castle shadow
    mirror basket button ladder hammer carpet curtain blanket pillow bucket needle thread paper
    ribbon rocket planet desert ocean valley meadow harbour station ticket wagon bicycle tractor
    train plane boat ship lamp door wall roof floor house street city road path field farm barn
    bread butter cheese sugar honey coffee tea milk water soup rice bean onion carrot potato tomato
    lemon cherry peach melon grape berry cat dog horse sheep goat rabbit mouse tiger lion bear wolf
    fox eagle owl duck goose swan whale shark turtle frog spider bee ant book page song music dance
    game ball kite drum flute violin piano guitar picture colour number question answer word voice
    night day week month year hour minute king queen friend child brother sister mother father baby
    stone sand rain snow wind cloud storm fire smoke star moon sun light tree leaf flower seed root
    """
)

VERBS = words(
    """
    sees finds takes makes likes wants needs knows paints draws writes reads opens closes carries
    follows watches hears sings plays builds breaks cleans cooks eats drinks buys sells gives sends
    brings holds throws catches pulls pushes turns moves cuts counts hides keeps loses loves helps
    """
)

ADJECTIVES = words(
    """
    small big old new young happy sad quick slow bright dark warm cold soft hard quiet loud sweet
    bitter round square tall short long wide narrow heavy light early late empty full clean dirty
    gentle brave clever strange simple wild calm proud kind rich poor deep high low dry wet red blue
    green yellow black white brown golden silver wooden
    """
)

OPENINGS = (
    *("Please, ", "Hey, ", "Ok, ", "So: ", "Now: ", "Well, ", "Excuse me, ", "One question: "),
    "Can you help me? ",
)

ADVERBS = words("today tomorrow often never slowly quickly here there again soon always")


def compose(rng: Random, templates: Sequence[str], **fields: object) -> str:
    """Choose a template, make its wording casual at random, then fill it in."""
    return roughen(rng, rng.choice(templates)).format(**fields)


def roughen(rng: Random, template: str) -> str:
    """Drop capitals and final punctuation at random, and add a polite word.

    Changes only the template, never the values filled in: a phrase to copy keeps its letters.
    """
    if rng.random() < 0.12:
        template = rng.choice(OPENINGS) + template
    if rng.random() < 0.25:
        template = template.lower()
    if rng.random() < 0.2 and template[-1] in ".?!":
        template = template[:-1].rstrip()
    return template


def wording_key(text: str) -> str | None:
    """The key of a fixed question, of which only wordings after an OPENING are ever held out.

    There are few such questions; the model would not know one that is held out entirely.
    """
    opened = text.lower().startswith(tuple(opening.lower() for opening in OPENINGS))
    return f"wording {text}" if opened else None


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def sentence(rng: Random) -> str:
    subject = f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if rng.random() < 0.4:
        subject = rng.choice(NAMES)
    target = rng.choice(("the", "a", "my", "your", "one")) + f" {rng.choice(NOUNS)}"
    ending = f" {rng.choice(ADVERBS)}" if rng.random() < 0.3 else ""
    return f"{subject} {rng.choice(VERBS)} {target}{ending}"


def person(rng: Random, known: float) -> str:
    """A name, one of NAMES with this probability."""
    return rng.choice(NAMES) if rng.random() < known else invented_name(rng)


def invented_name(rng: Random) -> str:
    """Make up a name of two or three syllables, so that recall does not depend on known names."""
    syllables = [
        rng.choice("bdfghjklmnprstvz") + rng.choice(("a", "e", "i", "o", "u", "ai", "an", "el"))
        for _ in range(rng.randint(2, 3))
    ]
    return "".join(syllables).capitalize()
