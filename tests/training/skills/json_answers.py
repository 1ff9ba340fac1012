"""Answers as JSON: objects with the keys that were asked for, or that a grammar forces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeAlias

import msgspec
from tests.training.dialogue import Exchange, Skill, Split, Thread, Tools, draw
from tests.training.skills.facts import COLOUR_ASKED, COLOUR_OF, LEGS_ASKED, LEGS_OF
from tests.training.skills.tool_kinds import city
from tests.training.words import (
    COLOURS,
    NOUNS,
    PETS,
    article,
    compose,
    person,
    phrases,
    roughen,
    words,
)

Value: TypeAlias = str | int

FORCED = '{"'
"""All that a grammar forces before the keys, of which every one may come."""


class Field(msgspec.Struct, frozen=True):
    """A fact about a person: its possible keys, its phrasings and its values."""

    keys: tuple[str, ...]
    told: tuple[str, ...]
    draw: Callable[[Random], Value]


class _Question(msgspec.Struct, frozen=True):
    """A question, keys that its answer may go by, and the answer."""

    text: str
    keys: tuple[str, ...]
    value: Value


JOBS = words(
    "teacher doctor painter farmer baker pilot nurse singer writer cook driver judge sailor dentist"
)
NAME_KEYS = ("name", "name", "name", "person", "who", "user", "first_name")
FIELDS = (
    Field(("age", "age", "age", "years"), ("is {} years old", "is {}", "is {} years old"),
          lambda rng: rng.randint(1, 99)),
    Field(("city", "city", "town", "home", "place"), ("lives in {}", "is from {}", "comes from {}"),
          city),
    Field(("colour", "color", "favourite_colour"), ("likes {}", "likes the colour {}"),
          lambda rng: rng.choice(COLOURS)),
    Field(("pet", "pet", "animal"), ("has a {}", "owns a {}"), lambda rng: rng.choice(PETS)),
    Field(("job", "job", "profession", "work"), ("is a {}", "works as a {}"),
          lambda rng: rng.choice(JOBS)),
)  # fmt: skip

WITH_KEYS = phrases(
    """
    {text} Write this as JSON with the keys {keys}. | {text} Answer as JSON with the keys {keys}. |
    {text} As JSON with the keys {keys}, please. | As JSON with the keys {keys}: {text} |
    Write as JSON with the keys {keys}: {text} |
    Give me a JSON object with the keys {keys}: {text} | Give me {keys} as JSON: {text} |
    Extract {keys} as JSON: {text} | {text} Give me the {keys} as JSON. |
    {text} Return {keys} as JSON.
    """
)
WITH_ONE_KEY = tuple(text.replace("keys", "key", 1) for text in WITH_KEYS[:6] if "the keys" in text)
WITHOUT_KEYS = phrases(
    """
    {text} Write this as JSON. | {text} Answer as JSON. | {text} Answer in JSON. | As JSON: {text} |
    Write as JSON: {text} | Extract as JSON: {text} | {text} Give me JSON. |
    {text} Reply with a JSON object.
    """
)
UNSAID = phrases(
    """
    {text} | {text} | Extract the person: {text} | Extract: {text} | Who is this? {text}
    """
)
ANSWER_KEYS = ("answer", "result", "value", "number", "reply", "output", "text")


def write(rng: Random, split: Split) -> Thread:
    """Ask for an object. Held out are persons by name, and facts by their questions."""
    return (_person(rng, split) if rng.random() < 0.6 else _answer(rng, split),)


def write_forced(rng: Random, split: Split) -> Thread:
    """Ask for something that a grammar, which is not in the prompt, makes an object."""
    one = _forced_person(rng, split) if rng.random() < 0.45 else _forced_answer(rng, split)
    return (msgspec.structs.replace(one, given=FORCED),)


def schema_of(answer: str) -> str:
    """A JSON schema that holds an answer to its keys and the types of its values."""
    fields: dict[str, Value] = json.loads(answer)
    schema = {
        "type": "object",
        "properties": {
            key: {"type": "integer" if isinstance(value, int) else "string"}
            for key, value in fields.items()
        },
        "required": list(fields),
        "additionalProperties": False,
    }
    return json.dumps(schema)


def _facts(rng: Random, split: Split) -> tuple[str, list[tuple[tuple[str, ...], Value]]]:
    """Describe a person; return the text, and keys and values in their order in it."""

    name = draw(rng, split, lambda it: person(it, known=0.5), lambda it: f"json {it}")
    chosen = rng.sample(FIELDS, rng.choice((1, 1, 2, 2, 3, 4)))
    fields = [(field, field.draw(rng)) for field in chosen]
    told = [rng.choice(field.told).format(value) for field, value in fields]
    known: list[tuple[tuple[str, ...], Value]] = [(NAME_KEYS, name)]
    return f"{name} {_listed(told)}.", known + [(field.keys, value) for field, value in fields]


def _person(rng: Random, split: Split) -> Exchange:
    text, known = _facts(rng, split)
    if rng.random() < 0.3:
        question = roughen(rng, rng.choice(WITHOUT_KEYS)).format(text=text)
        return Exchange(question, _object([(keys[0], value) for keys, value in known]))
    chosen = rng.sample(known, rng.randint(1, len(known)))
    fields = [(rng.choice(keys), value) for keys, value in chosen]
    return Exchange(_with_keys(rng, text, [key for key, _ in fields]), _object(fields))


def _forced_person(rng: Random, split: Split) -> Exchange:
    text, known = _facts(rng, split)
    chosen = rng.sample(known, rng.randint(1, len(known)))
    if rng.random() < 0.6:
        chosen.sort(key=known.index)
    fields = [(rng.choice(keys), value) for keys, value in chosen]
    return Exchange(roughen(rng, rng.choice(UNSAID)).format(text=text), _object(fields))


def _answer(rng: Random, split: Split) -> Exchange:
    question = _question(rng, split)
    if rng.random() < 0.4:
        asked = roughen(rng, rng.choice(WITHOUT_KEYS)).format(text=question.text)
        return Exchange(asked, _object([("answer", question.value)]))
    key = _key(rng, question.keys)
    return Exchange(_with_keys(rng, question.text, [key]), _object([(key, question.value)]))


def _forced_answer(rng: Random, split: Split) -> Exchange:
    question = _question(rng, split)
    value = question.value
    if isinstance(value, int) and rng.random() < 0.15:
        value = str(value)
    return Exchange(question.text, _object([(_key(rng, question.keys), value)]))


def _key(rng: Random, keys: Sequence[str]) -> str:
    chance = rng.random()
    if chance < 0.5:
        return rng.choice(keys)
    return rng.choice(ANSWER_KEYS) if chance < 0.8 else rng.choice(NOUNS)


def _question(rng: Random, split: Split) -> _Question:
    """Draw a question. No sums: to add, a model this small has to repeat the numbers first."""
    return draw(rng, split, _fact, lambda it: f"json {it.text}")


def _fact(rng: Random) -> _Question:
    if rng.random() < 0.6:
        thing, colour = rng.choice(tuple(COLOUR_OF.items()))
        text = rng.choice(COLOUR_ASKED).format(thing=thing)
        return _Question(text, ("colour", "color"), colour)
    animal, legs = rng.choice(tuple(LEGS_OF.items()))
    text = rng.choice(LEGS_ASKED).format(animal=article(animal))
    return _Question(text, ("legs", "number"), legs)


def _with_keys(rng: Random, text: str, keys: Sequence[str]) -> str:
    shown = [f'"{key}"' for key in keys] if rng.random() < 0.3 else list(keys)
    templates = WITH_ONE_KEY if len(keys) == 1 else WITH_KEYS
    return compose(rng, templates, text=text, keys=_listed(shown))


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _object(fields: Sequence[tuple[str, Value]]) -> str:
    return json.dumps(dict(fields), ensure_ascii=False)


JSON = Skill("json", weight=1.4, write=write, thought="I write JSON.", tools=Tools.WITHOUT)
JSON_FORCED = Skill("json_schema", 0.9, write_forced, "I write JSON.", tools=Tools.WITHOUT)
