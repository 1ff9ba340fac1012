"""Decoding of request bodies and checks of their fields.

A documented field that is not supported is rejected by name, unless its value requests nothing.
An undocumented field is ignored, as in SGLang, and counted.
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
"""Maximum number of digits shown of a number that is out of range."""
_STEP = re.compile(r"\.(\w+)|\[(\d+)?(?:\.\.\.)?\]")
_WITHIN = re.compile(r"(?:missing required|contains unknown) field `([^`]+)`")
_MODEL = "default"
"""SGLang clients use this name for any model."""

NO_EFFECT = frozenset(
    {
        "conversation_id",
        "log_metrics",
        "metadata",
        "no_logs",
        "prompt_cache_key",
        "safety_identifier",
        "session_id",
        "torch_empty_cache",  # worker memory cannot be released between requests
        "user",
    }
)
"""Labels and hints: accepted and ignored, since they do not change the output."""
_SIZED: Mapping[str, type[Sized]] = {"array": list, "object": dict, "str": str}
NOTHING: tuple[object, ...] = ({}, [], "")
"""Values that request nothing."""


class UnsupportedField(msgspec.Struct, frozen=True):
    """A documented field that this server does not support.

    Attributes:
        reason: Why, as part of the error message.
        neutral: Values that request nothing and are accepted. So is a list of nulls (in a batch).
    """

    reason: str
    neutral: tuple[object, ...] = ()


_ROUTING = UnsupportedField("requests are placed by the scheduler; clients cannot select a worker")

COMMON: Mapping[str, UnsupportedField] = {
    "beam_width": UnsupportedField("beam search is not supported", (1,)),
    "watermark": UnsupportedField("watermarks are not supported", (*NOTHING, {"enabled": False})),
    "return_routed_experts": UnsupportedField("expert routing is not recorded", (False,)),
    "return_spec_tokens_details": UnsupportedField(
        "draft tokens are counted by worker, not by request", (False,)
    ),
    "lora_path": UnsupportedField("LoRA adapters are not supported", NOTHING),
    "custom_labels": UnsupportedField("metric labels cannot be set by a request body", NOTHING),
    "bootstrap_host": _ROUTING,
    "bootstrap_port": _ROUTING,
    "bootstrap_room": _ROUTING,
    "bootstrap_pair_key": _ROUTING,
    "disagg_prefill_dp_rank": _ROUTING,
    "routed_dp_rank": _ROUTING,
    "data_parallel_rank": _ROUTING,
}

EMBEDDING: Mapping[str, UnsupportedField] = {
    name: COMMON[name]
    for name in (
        *("lora_path", "custom_labels"),
        *("routed_dp_rank", "data_parallel_rank"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    )
}


def unsupported_fields(kind: type[msgspec.Struct]) -> Mapping[str, UnsupportedField]:
    """The rejected fields of a body, which its class declares as `UNSUPPORTED`."""
    return getattr(kind, "UNSUPPORTED", {})


def read(body: bytes, kind: type[B]) -> tuple[B, list[str]]:
    """Decode a body. Also return the names of its undocumented fields, sorted.

    Raises:
        InvalidRequest: It is not JSON, a field is wrong, or too many fields are unknown.
        RequestTooLarge: A free-form field is too long.
        Unsupported: A field requests something that is not supported.
    """
    fields, unsupported = decode(body, dict[str, msgspec.Raw]), unsupported_fields(kind)
    known = kind.__struct_encode_fields__
    unknown = fields.keys() - unsupported.keys() - NO_EFFECT - set(known)
    _check_amounts(fields, len(unknown))
    for name, why in unsupported.items():
        if name in fields:
            _check_unsupported(name, fields[name], why)
    _check_text(body)
    return decode(body, kind), sorted(unknown)


def decode(json: bytes | msgspec.Raw, kind: type[T], field: str = "") -> T:
    """Decode a body, or the value of one field of it; an InvalidRequest names the field."""
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


def model_of(name: str | None) -> str | None:
    """Return the requested model; None for the served one."""
    return None if name in (None, "", _MODEL) else name


@cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


def _check_text(body: bytes) -> None:
    """Reject text that is not UTF-8: msgspec does not validate raw values."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def _invalid(text: str, field: str, kind: type) -> InvalidRequest:
    """Build the error with the field's path, which ends msgspec's text, and the allowed values."""
    path = _path(text, field)
    if within := _WITHIN.search(text):
        path = f"{path}.{within[1]}" if path else within[1]
    what = _AT.sub("", text)
    if _NOT_ONE_OF.match(text) and (allowed := _values_at(kind, _inner_path(text))):
        what = f"{what}; allowed are {', '.join(map(repr, allowed))}"
    return InvalidRequest(f"{path}: {what}" if path else what, param=path or None)


def _path(text: str, field: str) -> str:
    """The path that msgspec reports, relative to the body."""
    inner = _inner_path(text)
    joint = "." if field and inner and not inner.startswith("[") else ""
    return f"{field}{joint}{inner}"


def _inner_path(text: str) -> str:
    """The path that msgspec reports, relative to the decoded value."""
    at = _AT.search(text)
    return at[1] if at else ""


def _values_at(kind: type, place: str) -> list[object]:
    """Allowed values of an enum or literal at `place`, over all alternative types there."""
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
    """Types of an object's member, or of the values of a list or mapping."""
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
        text = f"the body has {unknown} unknown fields; at most {limits.UNKNOWN_MAX} are allowed"
        raise InvalidRequest(text)
    if (found := limits.oversized(fields)) is not None:
        name, size = found
        raise RequestTooLarge(
            f"{name}: the value has {size} bytes of JSON; the limit is "
            f"{limits.JSON_BYTES_MAX} bytes",
            param=name,
            details={"size_bytes": str(size), "bytes_max": str(limits.JSON_BYTES_MAX)},
        )


def _too_long(json: bytes | msgspec.Raw, text: str, field: str) -> InvalidRequest | None:
    """Report the actual length, since msgspec reports only the limit."""
    if (found := _TOO_LONG.search(text)) is None:
        return None
    kind, most = found[1], int(found[2])
    sizes = [len(each) for each in _named(json, text) if isinstance(each, _SIZED[kind])]
    if not sizes:
        return None  # an object key: msgspec reports no path for it
    path, unit = _path(text, field), "characters" if kind == "str" else "entries"
    where = f"{path}: {max(sizes)}" if path else str(max(sizes))
    return InvalidRequest(f"{where} {unit}; the limit is {most}", param=path or None)


def _out_of_range(
    json: bytes | msgspec.Raw, text: str, invalid: InvalidRequest
) -> InvalidRequest | None:
    if (found := _OUT_OF_RANGE.search(text)) is None:
        return None
    within, bound = _WITHIN_BOUND[found[1]], msgspec.json.decode(found[2])
    for each in _named(json, text):
        if type(each) in {int, float} and not within(cast("float", each), bound):
            shown = str(each)
            cut = f"{shown[:_SHOWN]}..." if len(shown) > _SHOWN else shown
            return InvalidRequest(f"{invalid.message}, got {cut}", param=invalid.param)
    return None


def _named(json: bytes | msgspec.Raw, text: str) -> list[object]:
    """Values at the path that msgspec reports."""
    try:
        body = msgspec.json.decode(json)
    except msgspec.DecodeError:  # a number of more than 64 bits after the rejected value
        return []
    return _at(body, text.partition("`$")[2].rpartition("`")[0])


def _at(value: object, place: str) -> list[object]:
    """Values at a path in msgspec's notation; `[...]` stands for any value of an object."""
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


def _check_unsupported(name: str, raw: msgspec.Raw, unsupported: UnsupportedField) -> None:
    value: object = decode(raw, object, name)
    if not _is_neutral(value) and not any(_same(value, each) for each in unsupported.neutral):
        raise Unsupported.at(name, unsupported.reason)


def _is_neutral(value: object) -> bool:
    if isinstance(value, list):
        return all(each is None for each in cast("list[object]", value))
    return value is None


def _same(value: object, allowed: object) -> bool:
    """Whether two values are equal as JSON, where true is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
