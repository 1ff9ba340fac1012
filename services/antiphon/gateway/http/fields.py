"""The fields of a body: which are read, which only refuse what is not their default.

A field that is documented and not built yet is refused by name, unless its value asks for nothing.
A field that nobody documents is ignored, as in SGLang, and counted.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from antiphon.wire.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)(?:\[\.\.\.\])?`$")
_WITHIN = re.compile(r"(?:missing required|contains unknown) field `([^`]+)`")


class Refused(msgspec.Struct, frozen=True):
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


def read(body: bytes, kind: type[B], refused: Mapping[str, Refused]) -> tuple[B, int]:
    """Decode a body; count the fields that nobody documents.

    Raises:
        InvalidRequest: Not JSON, or a field has a wrong type or value; `param` names it.
        Unsupported: A field asks for what is not built.
    """
    fields = decode(body, dict[str, msgspec.Raw])
    for name, why in refused.items():
        if name in fields:
            _check_refused(name, fields[name], why)
    _check_text(body)
    known = kind.__struct_encode_fields__
    unknown = sum(
        name not in known and name not in refused and name not in NO_EFFECT for name in fields
    )
    return decode(body, kind), unknown


def decode(json: bytes | msgspec.Raw, kind: type[T], field: str = "") -> T:
    """Decode a body, or the value of one field of it.

    Raises:
        InvalidRequest: It is not JSON, or not of this kind.
    """
    try:
        return _decoder(kind).decode(json)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), field) from error
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


def _invalid(text: str, field: str) -> InvalidRequest:
    """Name the field: msgspec puts its path at the end of the text."""
    at = _AT.search(text)
    path = field or (at[1] if at else "")
    within = _WITHIN.search(text)
    if within:
        path = f"{path}.{within[1]}" if path else within[1]
    what = _AT.sub("", text)
    return InvalidRequest(f"{path}: {what}" if path else what, param=path or None)


def _check_refused(name: str, raw: msgspec.Raw, refused: Refused) -> None:
    value: object = decode(raw, object, name)
    if not _is_nothing(value) and not any(_same(value, each) for each in refused.neutral):
        raise Unsupported(f"{name}: {refused.reason}", param=name)


def _is_nothing(value: object) -> bool:
    if isinstance(value, list):
        return all(each is None for each in cast("list[object]", value))
    return value is None


def _same(value: object, allowed: object) -> bool:
    """Whether they are equal as JSON: there, true is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
