"""Random JSON schemas, each with the check of what it asks for, and random regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

Check = Callable[[object], bool]
Schema = dict[str, object]
KEYS = ("name", "alter", "größe", "世界", 'q"uote', "back\\slash", "x y", "👋", "tab\t")


def random_schema(dice: random.Random, depth: int = 3) -> tuple[Schema, Check]:
    """A schema of every kind that is compiled, and whether a value is one of it."""
    kinds = [_integer, _number, _string, _pattern, _word, _boolean, _null]
    if depth:
        kinds += [_object, _object, _array, _map, _either]
    make = dice.choice(kinds)
    return make(dice, depth - 1)


def random_pattern(dice: random.Random, depth: int = 3) -> str:
    """A regular expression that Python reads the same, of texts that come to an end."""
    if not depth:
        return dice.choice(
            ["a", "Z", "7", "é", "世", "👋", " ", "[a-f]", "[^xyz]", r"\d", r"\w", "."]
        )
    make = dice.choice([_sequence, _choice, _repeated])
    return make(dice, depth - 1)


def _sequence(dice: random.Random, depth: int) -> str:
    return "".join(random_pattern(dice, depth) for _ in range(dice.randint(1, 4)))


def _choice(dice: random.Random, depth: int) -> str:
    return "(" + "|".join(random_pattern(dice, depth) for _ in range(dice.randint(2, 3))) + ")"


def _repeated(dice: random.Random, depth: int) -> str:
    return f"({random_pattern(dice, depth)})" + dice.choice(["?", "{2}", "{1,3}", "{0,2}", "{1,5}"])


def _integer(dice: random.Random, _: int) -> tuple[Schema, Check]:
    low, high = sorted(dice.sample(range(-1000, 1000), 2))
    schema: Schema = {"type": "integer", "minimum": low, "maximum": high}
    return schema, lambda value: type(value) is int and low <= value <= high


def _number(dice: random.Random, _: int) -> tuple[Schema, Check]:
    low = dice.randint(-50, 50) / 4
    return {
        "type": "number",
        "minimum": low,
    }, lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value >= low


def _string(dice: random.Random, _: int) -> tuple[Schema, Check]:
    longest = dice.randint(1, 12)
    schema: Schema = {"type": "string", "maxLength": longest}
    return schema, lambda value: isinstance(value, str) and len(value) <= longest


def _pattern(dice: random.Random, _: int) -> tuple[Schema, Check]:
    pattern = dice.choice(["[a-z]{2,8}", r"\d{3}-\d{4}", "(ja|nein|世界)", "[^a-m]{1,4}", ".{2}"])
    schema: Schema = {"type": "string", "pattern": f"^{pattern}$"}
    return schema, lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value))


def _word(dice: random.Random, _: int) -> tuple[Schema, Check]:
    words = dice.sample(["red", 'with "quotes"', "ünï", "👋🏽", 3, None, True, "\n", {"a": [1]}], 3)
    return {"enum": words}, lambda value: any(_same(value, word) for word in words)


def _boolean(_: random.Random, __: int) -> tuple[Schema, Check]:
    return {"type": "boolean"}, lambda value: isinstance(value, bool)


def _null(_: random.Random, __: int) -> tuple[Schema, Check]:
    return {"type": "null"}, lambda value: value is None


def _object(dice: random.Random, depth: int) -> tuple[Schema, Check]:
    names = dice.sample(KEYS, dice.randint(1, 4))
    parts = {name: random_schema(dice, depth) for name in names}
    required = [name for name in names if dice.random() < 0.6]
    schema: Schema = {
        "type": "object",
        "properties": {name: part for name, (part, _) in parts.items()},
        "required": required,
        "additionalProperties": False,
    }

    def check(value: object) -> bool:
        return (
            isinstance(value, dict)
            and set(required) <= set(value) <= set(names)
            and all(parts[name][1](part) for name, part in value.items())
        )

    return schema, check


def _array(dice: random.Random, depth: int) -> tuple[Schema, Check]:
    part, check = random_schema(dice, depth)
    low = dice.randint(0, 2)
    high = low + dice.randint(1, 3)
    schema: Schema = {"type": "array", "items": part, "minItems": low, "maxItems": high}
    return (
        schema,
        lambda value: (
            isinstance(value, list) and low <= len(value) <= high and all(map(check, value))
        ),
    )


def _map(dice: random.Random, depth: int) -> tuple[Schema, Check]:
    part, check = random_schema(dice, depth)
    schema: Schema = {"type": "object", "additionalProperties": part}
    return schema, lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _either(dice: random.Random, depth: int) -> tuple[Schema, Check]:
    (a, is_a), (b, is_b) = random_schema(dice, depth), random_schema(dice, depth)
    return {"anyOf": [a, b]}, lambda value: is_a(value) or is_b(value)


def _same(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b
