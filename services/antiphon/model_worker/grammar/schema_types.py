"""Which values a schema allows, as far as it declares them: enough to prove schemas disjoint.

Where nothing is known, any value is assumed to be possible, so that callers err on the safe side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.wire.schemas import Json

if TYPE_CHECKING:
    from collections.abc import Iterator

_EVERY = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_DEPTH_MAX = 16
"""Maximum depth of nested unions, and of chains of references."""

Types = frozenset[str]
Object = dict[str, Json]


class SchemaTypes:
    """Answers questions about the schemas inside one root, which must not change meanwhile."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._types: dict[int, Types] = {}
        self._refused: dict[tuple[int, int], bool] = {}
        self._depth = 0

    def is_root(self, schema: Json) -> bool:
        return schema is self._root

    def resolve(self, reference: str) -> Json:
        """The target of a JSON pointer of plain names; any value if it does not resolve."""
        found = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            if not isinstance(found, dict) or name not in found:
                return True
            found = found[name]
        return found

    def types(self, schema: Json) -> Types:
        """The types of its values; `number` means a number that is not an integer."""
        if not isinstance(schema, dict):
            return Types() if schema is False else _EVERY
        if id(schema) not in self._types:
            self._types[id(schema)] = _EVERY  # a recursive question: unknown
            self._depth += 1
            if self._depth <= _DEPTH_MAX:
                self._types[id(schema)] = self._types_of(schema)
            self._depth -= 1
        return self._types[id(schema)]

    def disjoint(self, one: Json, other: Json) -> bool:
        """Whether no value generated for either schema also matches the other."""
        return self._refuses(one, other) and self._refuses(other, one)

    def discriminator(self, one: Json, other: Json) -> str | None:
        """The name of a property whose values distinguish the objects of two schemas, if any."""
        one, other = self._resolved(one), self._resolved(other)
        return next(self._tags(one, other), None)

    def require(self, schema: Json, name: str) -> None:
        schema = self._resolved(schema)
        if isinstance(schema, dict) and name not in _names(schema):
            schema["required"] = [*_names(schema), name]

    def _types_of(self, schema: Object) -> Types:
        if "$ref" in schema:
            return self.types(self._resolved(schema))
        if (values := _values(schema)) is not None:
            return Types(map(type_of, values))
        if parts := _parts(schema):
            return Types().union(*map(self.types, parts))
        if "type" in schema:
            return types_named(schema["type"])
        return _EVERY

    def _refuses(self, other: Json, one: Json, depth: int = 0) -> bool:
        one, other = self._resolved(one), self._resolved(other)
        if not self.types(one) & self.types(other):
            return True
        if depth > _DEPTH_MAX or not isinstance(one, dict) or not isinstance(other, dict):
            return False
        pair = (id(one), id(other))
        if pair not in self._refused:
            self._refused[pair] = False  # a recursive question: unknown
            self._refused[pair] = self._refuses_all(other, one, depth + 1)
        return self._refused[pair]

    def _refuses_all(self, other: Object, one: Object, depth: int) -> bool:
        if parts := _parts(one):
            return all(self._refuses(other, part, depth) for part in parts)
        if parts := _parts(other):
            return all(self._refuses(part, one, depth) for part in parts)
        if _differ(_values(one), _values(other)):
            return True
        return self.types(one) == Types({"object"}) and self._refuses_objects(other, one)

    def _refuses_objects(self, other: Object, one: Object) -> bool:
        if any(name not in _properties(one) for name in _names(other)) and _closed(one):
            return True
        if any(name not in _properties(other) for name in _names(one)) and (
            other.get("additionalProperties") is False and _closed(other)
        ):
            return True
        return any(name in _names(one) for name in self._tags(one, other))

    def _tags(self, one: Json, other: Json) -> Iterator[str]:
        if isinstance(one, dict) and isinstance(other, dict):
            theirs = _properties(other)
            for name, part in _properties(one).items():
                values = self._values(part)
                if name in theirs and values and _differ(values, self._values(theirs[name])):
                    yield name

    def _values(self, schema: Json) -> list[Json] | None:
        schema = self._resolved(schema)
        return _values(schema) if isinstance(schema, dict) else None

    def _resolved(self, schema: Json) -> Json:
        """The schema that a chain of references ends at; the schema itself without any."""
        for _ in range(_DEPTH_MAX):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str):
                return schema
            schema = self.resolve(reference)
        return True


def type_of(value: Json) -> str:
    """The type of a value; 1.0 is an integer, as in JSON Schema."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def types_named(keyword: Json) -> Types:
    """What a `type` keyword allows; `number` includes integers."""
    names = keyword if isinstance(keyword, list) else [keyword]
    types = Types(name for name in names if isinstance(name, str))
    return types | {"integer"} if "number" in types else types


def _values(schema: Object) -> list[Json] | None:
    """All values of a schema that lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _parts(schema: Object) -> list[Json]:
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        if isinstance(parts, list):
            return parts
    return []


def _differ(some: list[Json] | None, others: list[Json] | None) -> bool:
    if some is None or others is None:
        return False
    return not any(
        type_of(one) == type_of(other) and one == other for one in some for other in others
    )


def _properties(schema: Object) -> Object:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _names(schema: Object) -> list[str]:
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return [name for name in names if isinstance(name, str)]


def _closed(schema: Object) -> bool:
    """Whether only listed properties are generated: others need an explicit keyword."""
    if not _properties(schema) or schema.get("additionalProperties"):
        return False
    others = ("patternProperties", "propertyNames", "unevaluatedProperties")
    return not any(word in schema for word in others)
