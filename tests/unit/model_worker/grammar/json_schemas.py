"""Random JSON schemas and regular expressions, and a validator that knows nothing of grammars.

`random_json_schema` draws every word that JSON Schema has, well-formed and otherwise by chance.
Words that no grammar can hold come too, and words in company in which they mean something else:
what is compiled must be held, and the rest refused.

Source of the words: JSON Schema, draft 2020-12, core and validation.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from jsonschema import Draft202012Validator, FormatChecker, ValidationError
from jsonschema.validators import extend

from antiphon.wire.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence

Schema = dict[str, object] | bool

NAMES = ("a", "b", "c", "name", "größe", "x y", 'q"', "世")
"""Short ones, so that names which are made up meet them."""
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
PATTERNS = ("^[a-c]{1,3}$", r"^\d{2}-\d{2}$", "^(ja|nein|世界)$", "^[^a-m]{1,4}$", "ab", "^a|b$")
FORMATS = ("date", "time", "date-time", "email", "ipv4", "uuid", "uri", "a note of mine")
WORDS = ("red", 'with "quotes"', "ünï", "👋🏽", "", "\n", 0, 3, -7, 2.5, None, True, {"a": [1]}, [])
REMARKS = {"title": "T", "description": 'Says { and " and ünï.', "default": None, "examples": [3]}
DEFINED_MAX = 3


KEYS = ("name", "alter", "größe", "世界", 'q"uote', "back\\slash", "x y", "👋", "tab\t")
TEXTS = ("[a-z]{2,8}", r"\d{3}-\d{4}", "(ja|nein|世界)", "[^a-m]{1,4}", ".{2}")
VALUES = ("red", 'with "quotes"', "ünï", "👋🏽", 3, None, True, "\n", {"a": [1]})


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, object]:
    """A schema of every kind that is compiled."""

    def inner() -> Schema:
        return random_schema(dice, depth - 1)

    low, high = sorted(dice.sample(range(-1000, 1000), 2))
    least = dice.randint(0, 2)
    kinds: list[Callable[[], dict[str, object]]] = [
        lambda: {"type": "integer", "minimum": low, "maximum": high},
        lambda: {"type": "number", "minimum": dice.randint(-50, 50) / 4},
        lambda: {"type": "string", "maxLength": dice.randint(1, 12)},
        lambda: {"type": "string", "pattern": f"^{dice.choice(TEXTS)}$"},
        lambda: {"enum": dice.sample(VALUES, 3)},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
    ]
    if depth:
        items = {"minItems": least, "maxItems": least + dice.randint(1, 3)}
        kinds += [lambda: _closed_object(dice, inner)] * 2
        kinds += [
            lambda: {"type": "array", "items": inner(), **items},
            lambda: {"type": "object", "additionalProperties": inner()},
            lambda: {"anyOf": [inner(), inner()]},
        ]
    return dice.choice(kinds)()


def _closed_object(dice: random.Random, inner: Callable[[], Schema]) -> dict[str, object]:
    names = dice.sample(KEYS, dice.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: inner() for name in names},
        "required": [name for name in names if dice.random() < 0.6],
        "additionalProperties": False,
    }


def random_pattern(dice: random.Random, depth: int = 3) -> str:
    """A regular expression that Python reads the same, of texts that come to an end."""
    if not depth:
        return dice.choice(
            ["a", "Z", "7", "é", "世", "👋", " ", "[a-f]", "[^xyz]", r"\d", r"\w", "."]
        )

    def inner() -> str:
        return random_pattern(dice, depth - 1)

    match dice.choice(["sequence", "choice", "repeated"]):
        case "sequence":
            return "".join(inner() for _ in range(dice.randint(1, 4)))
        case "choice":
            return "(" + "|".join(inner() for _ in range(dice.randint(2, 3))) + ")"
        case _:
            return f"({inner()})" + dice.choice(["?", "{2}", "{1,3}", "{0,2}", "{1,5}"])


def random_json_schema(dice: random.Random, depth: int = 3) -> Schema:
    """A schema with whatever it refers to. Each can be satisfied at every point of recursion."""
    return _Schemas(dice).whole(depth)


class _Schemas:
    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._defined: dict[str, object] = {}

    def whole(self, depth: int) -> Schema:
        for number in range(self._dice.randint(0, DEFINED_MAX)):
            self._defined[f"d{number}"] = self._recursive(f"d{number}", depth - 1)
        schema = self._schema(depth)
        whole = {} if isinstance(schema, bool) else schema  # some doors take objects only
        return {**whole, "$defs": self._defined} if self._defined else whole

    def _recursive(self, name: str, depth: int) -> Schema:
        """A schema that others refer to, and that may refer to itself where it need not."""
        if self._chance(0.6):
            return self._schema(depth)
        itself: Schema = {"$ref": f"#/$defs/{name}"}
        ways: list[Schema] = [
            {
                "type": "object",
                "properties": {"a": self._schema(0), "b": itself},
                "required": ["a"],
            },
            {"type": "array", "items": itself, "maxItems": 2},
            {"anyOf": [self._schema(0), {"type": "array", "items": itself, "maxItems": 2}]},
        ]
        return self._dice.choice(ways)

    def _schema(self, depth: int) -> Schema:
        kinds: list[Callable[[int], Schema]] = [
            *(self._string, self._integer, self._number, self._simple, self._words, self._several)
        ]
        if self._defined:
            kinds.append(self._reference)
        if depth > 0:
            kinds += [self._object] * 4 + [self._array] * 3 + [self._map, self._combined]
        schema = self._dice.choice(kinds)(depth - 1)
        return self._seasoned(schema, depth - 1)

    def _seasoned(self, schema: Schema, depth: int) -> Schema:
        """Add remarks often, and a word of any kind now and then."""
        if isinstance(schema, bool):
            return schema
        if self._chance(0.1):
            schema = {**schema, **dict(self._dice.sample(sorted(REMARKS.items()), 2))}
        if self._chance(0.04):
            word, make = self._dice.choice(sorted(self._strangers(depth).items()))
            schema = {word: make(), **schema}
        return schema

    def _strangers(self, depth: int) -> dict[str, Callable[[], object]]:
        """Words for any schema, whatever it is."""
        dice = self._dice

        def inner() -> object:
            return self._schema(min(depth, 0))

        return {
            "type": lambda: dice.choice(TYPES),
            "enum": lambda: dice.sample(WORDS, 3),
            "const": lambda: dice.choice(WORDS),
            "multipleOf": lambda: dice.choice([2, 5, 0.5]),
            "minimum": lambda: dice.randint(-9, 9),
            "exclusiveMaximum": lambda: dice.randint(-9, 9),
            "minLength": lambda: dice.randint(0, 4),
            "pattern": lambda: dice.choice(PATTERNS),
            "format": lambda: dice.choice(FORMATS),
            "required": lambda: [dice.choice(NAMES)],
            "properties": lambda: {dice.choice(NAMES): inner()},
            "additionalProperties": inner,
            "patternProperties": lambda: {"^a": inner()},
            "propertyNames": lambda: {"maxLength": 2},
            "minProperties": lambda: dice.randint(0, 3),
            "maxProperties": lambda: dice.randint(0, 3),
            "dependentRequired": lambda: {"a": ["b"]},
            "dependentSchemas": lambda: {"a": {"required": ["b"]}},
            "unevaluatedProperties": inner,
            "items": inner,
            "prefixItems": lambda: [inner()],
            "minItems": lambda: dice.randint(0, 3),
            "maxItems": lambda: dice.randint(0, 3),
            "uniqueItems": lambda: dice.choice([True, False]),
            "contains": inner,
            "minContains": lambda: 1,
            "unevaluatedItems": inner,
            "not": inner,
            "if": inner,
            "then": inner,
            "else": inner,
            "anyOf": lambda: [inner(), inner()],
            "oneOf": lambda: [inner(), inner()],
            "allOf": lambda: [inner(), inner()],
            "$anchor": lambda: f"anchor{dice.randint(0, 10**9)}",
            "contentEncoding": lambda: "base64",
            "x-note": lambda: 3,
        }

    def _string(self, _: int) -> Schema:
        dice, schema = self._dice, dict[str, object]({"type": "string"})
        match dice.choice(["plain", "length", "length", "pattern", "pattern", "format"]):
            case "length":
                least = dice.randint(0, 3)
                lengths = {"minLength": least, "maxLength": least + dice.randint(0, 6)}
                schema |= dict(dice.sample(sorted(lengths.items()), dice.randint(1, 2)))
            case "pattern":
                random_one = f"^({random_pattern(dice, 2)})$"
                schema["pattern"] = dice.choice([*PATTERNS, random_one])
            case "format":
                schema["format"] = dice.choice(FORMATS)
            case _:
                pass
        return schema

    def _integer(self, _: int) -> Schema:
        if self._chance(0.15):
            return {"type": "integer", "multipleOf": self._dice.choice([2, 5, 10])}
        return {"type": "integer", **self._bounds(lambda: self._dice.randint(-300, 300))}

    def _number(self, _: int) -> Schema:
        return {"type": "number", **self._bounds(lambda: self._dice.randint(-900, 900) / 8)}

    def _bounds(self, draw: Callable[[], float]) -> dict[str, object]:
        low, high = sorted((draw(), draw()))
        lower = {self._dice.choice(["minimum", "exclusiveMinimum"]): low}
        upper = {self._dice.choice(["maximum", "exclusiveMaximum"]): high + 2}
        return {**(lower if self._chance(0.6) else {}), **(upper if self._chance(0.6) else {})}

    def _simple(self, _: int) -> Schema:
        return self._dice.choice([{"type": "boolean"}, {"type": "null"}, {"const": "c"}, True, {}])

    def _words(self, _: int) -> Schema:
        if self._chance(0.3):
            return {"const": self._dice.choice(WORDS)}
        return {"enum": self._dice.sample(WORDS, self._dice.randint(1, 4))}

    def _several(self, depth: int) -> Schema:
        """One of two types, most often null: the words of one may stand beside the other."""
        dice = self._dice
        first = dice.choice([self._string, self._integer, self._number])(depth)
        assert isinstance(first, dict)
        second = "null" if self._chance(0.6) else dice.choice(TYPES)
        return first if first["type"] == second else {**first, "type": [first["type"], second]}

    def _reference(self, _: int) -> Schema:
        return {"$ref": f"#/$defs/{self._dice.choice(sorted(self._defined))}"}

    def _object(self, depth: int) -> Schema:
        dice = self._dice
        names = dice.sample(NAMES, dice.randint(1, 4))
        schema: dict[str, object] = {
            "type": "object",
            "properties": {name: self._schema(depth) for name in names},
        }
        if self._chance(0.8):
            schema["required"] = [name for name in names if self._chance(0.6)]
        if self._chance(0.7):
            schema["additionalProperties"] = self._chance(0.15) or self._schema_or_false(depth)
        if self._chance(0.1):
            schema[dice.choice(["minProperties", "maxProperties"])] = dice.randint(0, 4)
        return schema

    def _schema_or_false(self, depth: int) -> Schema:
        return self._schema(depth) if self._chance(0.2) else False

    def _map(self, depth: int) -> Schema:
        dice = self._dice
        shapes: Sequence[dict[str, object]] = (
            {"additionalProperties": self._schema(depth)},
            {"patternProperties": {dice.choice(PATTERNS): self._schema(depth)}},
            {"propertyNames": {"enum": dice.sample(NAMES, 3)}},
            {"propertyNames": {"pattern": "^[a-c]$"}, "additionalProperties": self._schema(depth)},
            {},
        )
        schema = {"type": "object", **dice.choice(shapes)}
        for word, least in (("minProperties", 0), ("maxProperties", 2)):
            if self._chance(0.2):
                schema[word] = least + dice.randint(0, 2)
        return schema

    def _array(self, depth: int) -> Schema:
        dice, schema = self._dice, dict[str, object]({"type": "array"})
        if self._chance(0.2):
            schema["prefixItems"] = [self._schema(depth) for _ in range(dice.randint(1, 3))]
            if self._chance(0.5):
                schema["items"] = self._schema_or_false(depth)
        elif self._chance(0.9):
            schema["items"] = self._schema(depth)
        least = dice.randint(0, 3)
        if self._chance(0.4):
            schema["minItems"] = least
        if self._chance(0.7):
            schema["maxItems"] = least + dice.randint(0, 2)
        if self._chance(0.03):
            schema["uniqueItems"] = True
        return schema

    def _combined(self, depth: int) -> Schema:
        dice = self._dice
        parts = [self._schema(depth) for _ in range(dice.randint(1, 3))]
        match dice.choice(["anyOf", "anyOf", "anyOf", "nullable", "oneOf", "tagged", "allOf"]):
            case "nullable":
                return {"anyOf": [parts[0], {"type": "null"}]}
            case "tagged":
                return {"oneOf": [self._tagged(tag, depth) for tag in ("x", "y")]}
            case "allOf":
                return {"allOf": parts[: dice.choice([1, 1, 1, 2])]}
            case word:
                return {word: parts}

    def _tagged(self, tag: str, depth: int) -> Schema:
        """What tools write for a union whose members say which they are."""
        return {
            "type": "object",
            "properties": {"kind": {"const": tag}, "a": self._schema(depth)},
            "required": ["kind", "a"],
        }

    def _chance(self, share: float) -> bool:
        return self._dice.random() < share


FORMAT_CHECKER = FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
"""Those that the library can tell by itself, and as the draft means them."""

_WORDS = (
    "not", "if", "contains", "uniqueItems", "dependentRequired", "dependentSchemas", "oneOf",
    "allOf", "type", "enum", "multipleOf", "minProperties", "patternProperties", "propertyNames",
    "pattern", "format", r"required '.*'",
)  # fmt: skip
REFUSALS = re.compile(
    rf"grammar: #[^:]*: ({'|'.join(_WORDS)}) "
    r"|: \S+ beside \S+ is not supported|: \S+ needs \"type\""
    # What the compiler finds by itself: schemas of no value, and arrays that end too soon.
    r"|no token may come next|cannot accept any value|[Mm]in\w+ is greater|[Mm]ax\w+ is less"
    r"|minimum greater than maximum|must be a whole number"
)
"""All reasons for which a schema is refused."""


def form_of(schema: object) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))


def check(schema: Mapping[str, object] | bool, answer: str) -> None:
    _Validator(schema, format_checker=FORMAT_CHECKER).validate(json.loads(answer))


def _pattern(_: object, pattern: str, value: object, __: object) -> Iterator[ValidationError]:
    """Where `$` is the end of the text alone, and not what comes before a last line break."""
    if isinstance(value, str) and not re.search(pattern.replace("$", r"\Z"), value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _enum(_: object, words: list[object], value: object, __: object) -> Iterator[ValidationError]:
    if not any(type(value) is type(word) and value == word for word in words):
        yield ValidationError(f"{value!r} is not one of {words!r}")


_Validator = extend(
    Draft202012Validator,
    {"pattern": _pattern, "enum": _enum},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: type(value) is int
    ),
)
"""Stricter than the draft: 3.0 is neither an integer nor 3."""
