"""Writes the reference page of the bus: `python -m antiphon.bus.reference [FILE]`."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from antiphon.config.markdown import table
from antiphon.wire.buckets import BUCKETS
from antiphon.wire.routes import ALL_ROLES, ROUTES, DeliveryMode, Party, RequestRoute, Route

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from antiphon.wire.base import Message

PAGE = Path("docs/reference/bus.md")

HEAD = """# The bus

<!-- Written by `python -m antiphon.bus.reference`; change antiphon.wire. -->

All subjects have the prefix `<cluster>.v1.`. A feed is published without a reply; a call is
answered with one of its replies or an `ErrorReply`. Messages are MessagePack maps with the name of
their type under `type`; NATS clients may use JSON instead and get JSON replies. Fields that have
their default value are omitted.
"""

BUCKETS_HEAD = """
## Buckets

Data that outlives a request is stored in JetStream key-value buckets, `<cluster>_<bucket>`. Each
bucket is read and written by one kind of service.
"""

SPREADS = {
    DeliveryMode.DIRECT: "the named instance or the leader",
    DeliveryMode.QUEUE: "any one",
    DeliveryMode.ALL: "all",
}


def page() -> str:
    """The whole page: the map of subjects, then every message and its parts."""
    head = ("subject", "kind", "from", "to", "received by", "messages", "replies")
    routes = "\n".join(table(head, map(_route, ROUTES)))
    messages = every_message()
    parts = _parts(messages)
    return "\n".join(
        [HEAD, "## Subjects\n", routes, BUCKETS_HEAD, *_buckets(), "\n## Messages\n"]
        + [_struct(message) for message in messages]
        + ["## Parts of messages\n", *map(_struct, parts)]
    )


def _buckets() -> Iterator[str]:
    rows = [(f"`{one.name}`", str(one.owner), one.keys, one.holds) for one in BUCKETS]
    return table(("bucket", "owner", "key", "contents"), rows)


def every_message() -> Sequence[type[Message]]:
    """What travels on any route, by name."""
    found = {
        message.__name__: message
        for route in ROUTES
        for message in (*route.carries, *_replies(route))
    }
    return [found[name] for name in sorted(found)]


def _route(route: Route[Message]) -> tuple[str, ...]:
    kind = "call" if _is_call(route) else "ordered feed" if route.ordered else "feed"
    return (
        f"`{route.subject}`",
        kind,
        _parties(route.senders),
        _parties(route.listeners),
        SPREADS[route.delivery],
        _links(route.carries),
        _links(_replies(route)),
    )


def _replies(route: Route[Message]) -> tuple[type[Message], ...]:
    return cast("RequestRoute[Message, Message]", route).replies if _is_call(route) else ()


def _is_call(route: Route[Message]) -> bool:
    return isinstance(route, RequestRoute)


def _parties(parties: tuple[Party, ...]) -> str:
    return "anybody" if parties == ALL_ROLES else ", ".join(parties)


def _links(messages: Iterable[type[Message]]) -> str:
    return ", ".join(f"[{m.__name__}](#{m.__name__.lower()})" for m in messages)


def _parts(messages: Iterable[type[msgspec.Struct]]) -> Sequence[type[msgspec.Struct]]:
    """The structs inside of messages, however deep, by name."""
    seen: dict[str, type[msgspec.Struct]] = {}
    found: dict[str, type[msgspec.Struct]] = {}
    waiting = list(messages)
    top = {message.__name__ for message in waiting}
    while waiting:
        struct = waiting.pop()
        seen[struct.__name__] = struct
        for hint in get_type_hints(struct).values():
            inner = [leaf for leaf in _leaves(hint) if leaf.__name__ not in seen]
            waiting += inner
            found |= {leaf.__name__: leaf for leaf in inner if leaf.__name__ not in top}
    return [found[name] for name in sorted(found)]


def _leaves(hint: object) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for argument in get_args(hint):
        yield from _leaves(argument)


def _struct(struct: type[msgspec.Struct]) -> str:
    hints = get_type_hints(struct, include_extras=True)
    promise, _, attributes = inspect.cleandoc(struct.__doc__ or "").partition("\nAttributes:\n")
    meanings = _meanings(attributes)
    rows = [
        (
            f"`{member.encode_name}`",
            _words(hints[member.name]),
            _default(member),
            meanings.get(member.name, ""),
        )
        for member in msgspec.structs.fields(struct)
    ]
    lines = [f"### {struct.__name__}", "", promise.strip()]
    tag = struct.__struct_config__.tag
    if tag not in (None, struct.__name__):
        lines += ["", f"Its `type` is `{tag}`."]
    if rows:
        lines += ["", *table(("field", "type", "default", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def _meanings(attributes: str) -> dict[str, str]:
    """Read the attributes of a docstring: `name: text`, continued on deeper lines."""
    entries = re.split(r"\n(?=    \w+:)", "\n" + attributes)[1:]
    pairs = (entry.strip().partition(":") for entry in entries)
    return {name: " ".join(text.split()) for name, _, text in pairs}


def _default(member: msgspec.structs.FieldInfo) -> str:
    if member.required:
        return "required"
    if member.default is msgspec.NODEFAULT:
        return "empty"
    return f"`{msgspec.json.encode(member.default).decode()}`"


def _words(hint: object) -> str:
    """A type as a reader of the wire sees it: `RequestId`, `int[]`, `text or null`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _words(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if origin is tuple:
        inner = [_words(argument) for argument in arguments if argument is not Ellipsis]
        if Ellipsis not in arguments:
            return f"({', '.join(inner)})"
        return f"({inner[0]})[]" if " or " in inner[0] else f"{inner[0]}[]"
    if origin is dict:
        return f"map of {_words(arguments[0])} to {_words(arguments[1])}"
    if origin is not None:
        return str(hint)
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))


_NAMES: dict[object, str] = {str: "text", type(None): "null", bool: "boolean"}


def main() -> None:
    """Write the page where the arguments say, or where the repository keeps it."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
