"""The fields of a body: which are read, which only refuse what is not their default.

A field that is documented and not built yet is refused by name, unless its value asks for nothing.
A field that nobody documents is ignored, as in SGLang, and counted.
"""

from __future__ import annotations

import operator
import re
from functools import cache
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
from msgspec import inspect

from antiphon.gateway.http.core import limits
from antiphon.wire.errors import InvalidRequest, RequestTooLarge, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sized

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)(?:\[\.\.\.\])?`$")
_NOT_ONE_OF = re.compile(r"Invalid enum value")
_TOO_LONG = re.compile(r"Expected `(array|object|str)` of length <= (\d+)")
_OUT_OF_RANGE = re.compile(r"Expected `(?:int|float)` (<=|<|>=|>) (-?[\d.e+-]+)")
_WITHIN_BOUND = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt}
_SHOWN = 40
"""How many digits of a number that is out of range are shown."""
_STEP = re.compile(r"\.(\w+)|\[(\d+)?(?:\.\.\.)?\]")
_WITHIN = re.compile(r"(?:missing required|contains unknown) field `([^`]+)`")


class UnsupportedField(msgspec.Struct, frozen=True):
    """A field that is documented elsewhere and not here.

    Attributes:
        reason: Why, for whoever asked for it.
        neutral: Values that ask for nothing, and pass. So does a list of nulls, as for a batch.
    """

    reason: str
    neutral: tuple[object, ...] = ()


NO_EFFECT = frozenset(
    {
        "conversation_id",
        "log_metrics",
        "metadata",
        "no_logs",
        "prompt_cache_key",
        "safety_identifier",
        "session_id",
        "torch_empty_cache",  # no worker keeps memory that it could give back then
        "user",
    }
)
"""Labels and hints: accepted, since leaving them out changes no answer."""


def read(
    body: bytes, kind: type[B], refused: Mapping[str, UnsupportedField]
) -> tuple[B, list[str]]:
    """Decode a body; list the fields that no documentation has, in order.

    Raises:
        InvalidRequest: Not JSON, a field has a wrong type or value, or there are too many of them;
            `param` names it.
        RequestTooLarge: A field of free form is too long.
        Unsupported: A field asks for what is not built.
    """
    fields = decode(body, dict[str, msgspec.Raw])
    known = kind.__struct_encode_fields__
    unknown = fields.keys() - refused.keys() - NO_EFFECT - set(known)
    _check_amounts(fields, len(unknown))
    for name, why in refused.items():
        if name in fields:
            _check_unsupported(name, fields[name], why)
    _check_text(body)
    return decode(body, kind), sorted(unknown)


def decode(json: bytes | msgspec.Raw, kind: type[T], field: str = "") -> T:
    """Decode a body, or the value of one field of it.

    Raises:
        InvalidRequest: It is not JSON, or not of this kind.
    """
    try:
        return _decoder(kind).decode(json)
    except msgspec.ValidationError as error:
        text = str(error)
        invalid = _invalid(text, field, kind)
        found = _too_long(json, text, field) or _out_of_range(json, text, invalid)
        raise found or invalid from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # Bytes that are not UTF-8 and numbers of thousands of digits are a ValueError.
        text = f"{field or 'the body'} is not valid JSON: {error}"
        raise InvalidRequest(text, param=field or None) from error


@cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


def _check_text(body: bytes) -> None:
    """Refuse what is not UTF-8 here: msgspec does not look into values that it leaves raw."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def _invalid(text: str, field: str, kind: type) -> InvalidRequest:
    """Name the field, whose path msgspec puts at the end of the text, and the values allowed."""
    path = _path(text, field)
    within = _WITHIN.search(text)
    if within:
        path = f"{path}.{within[1]}" if path else within[1]
    what = _AT.sub("", text)
    if _NOT_ONE_OF.match(text) and (allowed := _values_at(kind, _inner_path(text))):
        what = f"{what}; allowed are {', '.join(map(repr, allowed))}"
    return InvalidRequest(f"{path}: {what}" if path else what, param=path or None)


def _path(text: str, field: str) -> str:
    """The place that msgspec names, from the body on."""
    inner = _inner_path(text)
    joint = "." if field and inner and not inner.startswith("[") else ""
    return f"{field}{joint}{inner}"


def _inner_path(text: str) -> str:
    """The place that msgspec names, from the value on that is decoded."""
    at = _AT.search(text)
    return at[1] if at else ""


def _values_at(kind: type, place: str) -> list[object]:
    """Values that a field of a fixed set may have; those of all alternatives at its place."""
    types = [_type_info(kind)]
    for step in _STEP.finditer(place if place.startswith("[") else f".{place}"):
        types = [inner for each in types for inner in _types_inside(each, step[1])]
    found: dict[object, None] = {}
    for each in (alternative for one in types for alternative in _alternatives(one)):
        if isinstance(each, inspect.EnumType):
            found |= dict.fromkeys(member.value for member in each.cls)
        elif isinstance(each, inspect.LiteralType):
            found |= dict.fromkeys(each.values)
    return list(found)


@cache
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _types_inside(outer: inspect.Type, name: str | None) -> Iterator[inspect.Type]:
    """The types of a member of an object, or of the values of a list or of any object."""
    for each in _alternatives(outer):
        match each:
            case inspect.StructType():
                yield from (field.type for field in each.fields if field.encode_name == name)
            case inspect.DictType() if name is None:
                yield each.value_type
            case inspect.ListType() | inspect.VarTupleType() if name is None:
                yield each.item_type
            case _:
                pass


def _alternatives(one: inspect.Type) -> Iterator[inspect.Type]:
    match one:
        case inspect.Metadata():
            yield from _alternatives(one.type)
        case inspect.UnionType():
            yield from (each for member in one.types for each in _alternatives(member))
        case _:
            yield one


def _check_amounts(fields: Mapping[str, msgspec.Raw], unknown: int) -> None:
    if unknown > limits.UNKNOWN_MAX:
        text = f"the body has {unknown} fields that are not known; {limits.UNKNOWN_MAX} are allowed"
        raise InvalidRequest(text)
    found = limits.oversized(fields)
    if found is not None:
        name, size = found
        raise RequestTooLarge(
            f"{name}: its JSON has {size} bytes; the limit is {limits.JSON_BYTES_MAX} bytes",
            param=name,
            details={"size_bytes": str(size), "bytes_max": str(limits.JSON_BYTES_MAX)},
        )


def _too_long(json: bytes | msgspec.Raw, text: str, field: str) -> InvalidRequest | None:
    """Count what is too long: msgspec names the limit alone."""
    found = _TOO_LONG.search(text)
    if found is None:
        return None
    kind, most = found[1], int(found[2])
    sizes = [len(each) for each in _named(json, text) if isinstance(each, _SIZED[kind])]
    if not sizes:
        return None  # a key of an object, which has no place of its own
    path, unit = _path(text, field), "characters" if kind == "str" else "entries"
    where = f"{path}: {max(sizes)}" if path else str(max(sizes))
    return InvalidRequest(f"{where} {unit}; the limit is {most}", param=path or None)


def _out_of_range(
    json: bytes | msgspec.Raw, text: str, invalid: InvalidRequest
) -> InvalidRequest | None:
    """Show the number that is out of range beside the bound."""
    found = _OUT_OF_RANGE.search(text)
    if found is None:
        return None
    within, bound = _WITHIN_BOUND[found[1]], msgspec.json.decode(found[2])
    for each in _named(json, text):
        if type(each) in {int, float} and not within(cast("float", each), bound):
            shown = str(each)
            cut = f"{shown[:_SHOWN]}..." if len(shown) > _SHOWN else shown
            return InvalidRequest(f"{invalid.message}, got {cut}", param=invalid.param)
    return None


_SIZED: Mapping[str, type[Sized]] = {"array": list, "object": dict, "str": str}


def _named(json: bytes | msgspec.Raw, text: str) -> list[object]:
    """What stands at the place that msgspec names."""
    try:
        body = msgspec.json.decode(json)
    except msgspec.DecodeError:  # a number beyond 64 bits, behind the value that was refused
        return []
    return _at(body, text.partition("`$")[2].rpartition("`")[0])


def _at(value: object, place: str) -> list[object]:
    """What stands at a place as msgspec writes it; `[...]` is any value of an object."""
    values = [value]
    for step in _STEP.finditer(place):
        values = [inner for each in values for inner in _inner(each, step[1], step[2])]
    return values


def _inner(value: object, name: str | None, index: str | None) -> Iterator[object]:
    if isinstance(value, dict):
        members = cast("dict[str, object]", value)
        if name is None:
            yield from members.values()
        elif name in members:
            yield members[name]
    elif isinstance(value, list) and index:
        yield cast("list[object]", value)[int(index)]


def _check_unsupported(name: str, raw: msgspec.Raw, refused: UnsupportedField) -> None:
    value: object = decode(raw, object, name)
    if not _is_neutral(value) and not any(_same(value, each) for each in refused.neutral):
        raise Unsupported(f"{name}: {refused.reason}", param=name)


def _is_neutral(value: object) -> bool:
    if isinstance(value, list):
        return all(each is None for each in cast("list[object]", value))
    return value is None


def _same(value: object, allowed: object) -> bool:
    """Whether they are equal as JSON: there, true is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
