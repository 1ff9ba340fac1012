"""What decoding refuses: every number, name and list on the wire is bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec
import pytest
from msgspec import inspect
from tests.wire.examples import EXAMPLES
from tests.wire.test_codec import altered

from antiphon.wire import ids
from antiphon.wire.claim import PutPages
from antiphon.wire.codec import MalformedMessage, decode, encode
from antiphon.wire.command import CommandBatch
from antiphon.wire.errors import ErrorReply
from antiphon.wire.heartbeat import Heartbeat
from antiphon.wire.kv_events import KvReplayed
from antiphon.wire.routes import ROUTES, RequestRoute
from antiphon.wire.submit import AbortRequests, SubmitRequest
from antiphon.wire.text import TextBatch
from antiphon.wire.tokens import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.wire.base import Message


def structs() -> dict[str, inspect.StructType]:
    """Every struct that a message of the route table holds, by name."""
    found: dict[str, inspect.StructType] = {}

    def visit(kind: inspect.Type) -> None:
        match kind:
            case inspect.StructType() if kind.cls.__name__ not in found:
                found[kind.cls.__name__] = kind
                for field in kind.fields:
                    visit(field.type)
            case inspect.UnionType():
                for part in kind.types:
                    visit(part)
            case inspect.VarTupleType():
                visit(kind.item_type)
            case inspect.DictType():
                visit(kind.key_type)
                visit(kind.value_type)
            case inspect.Metadata():
                visit(kind.type)
            case _:
                pass

    for message in messages():
        visit(inspect.type_info(message))
    return found


def messages() -> list[type[Message]]:
    carried = [kind for route in ROUTES for kind in route.carries]
    replies = [
        kind for route in ROUTES if isinstance(route, RequestRoute) for kind in route.replies
    ]
    return [*dict.fromkeys([*carried, *cast("list[type[Message]]", replies), ErrorReply])]


def leaves(kind: inspect.Type) -> Iterator[inspect.Type]:
    match kind:
        case inspect.UnionType():
            for part in kind.types:
                yield from leaves(part)
        case inspect.VarTupleType():
            yield from leaves(kind.item_type)
        case inspect.DictType():
            yield from leaves(kind.key_type)
            yield from leaves(kind.value_type)
        case inspect.Metadata():
            yield from leaves(kind.type)
        case _:
            yield kind


FIELDS = [
    pytest.param(field.type, id=f"{name}.{field.name}")
    for name, struct in sorted(structs().items())
    for field in struct.fields
]


@pytest.mark.parametrize("kind", FIELDS)
def test_wire_number_has_bounds_on_both_sides(kind: inspect.Type) -> None:
    for leaf in leaves(kind):
        if isinstance(leaf, inspect.IntType):
            assert leaf.ge is not None or leaf.gt is not None
            assert leaf.le is not None or leaf.lt is not None
        if isinstance(leaf, inspect.FloatType):  # NaN fails every bound
            assert any(bound is not None for bound in (leaf.ge, leaf.gt, leaf.le, leaf.lt))


@pytest.mark.parametrize("kind", ids.LENGTHS_MAX, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("length", [0, 1, -1])
def test_wire_name_is_neither_empty_nor_too_long(kind: object, length: int) -> None:
    longest = ids.LENGTHS_MAX[kind]  # pyright: ignore[reportArgumentType]  # a NewType
    text = {0: "", 1: "x" * longest, -1: "x" * (longest + 1)}[length]
    if length == 1:
        assert msgspec.convert(text, kind) == text  # pyright: ignore[reportArgumentType, reportCallIssue]
    else:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(text, kind)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (TextBatch, "detokenizer.instance", ""),
        (TextBatch, "detokenizer.instance", "d" * 129),
        (TextBatch, "rows.0.choice", -1),
        (TextBatch, "rows.0.text_offset", -1),
        (TextBatch, "rows.0.usage.prompt_tokens", -1),
        (TokenBatch, "worker.incarnation", ""),
        (TokenBatch, "rows.0.offset", 2**40),
        (TokenBatch, "rows.0.stream.choices", 2**31),
        (TokenBatch, "rows.0.details.count", -1),
        (CommandBatch, "leader.number", 2**64 - 1),
        (CommandBatch, "commands.0.prompt_ids", b"abc"),
        (CommandBatch, "commands.0.choices", []),
        (CommandBatch, "commands.0.choices", [{"choice": 0}, {"choice": 0}]),
        (CommandBatch, "commands.0.detokenizer", ""),
        (SubmitRequest, "prompt_ids", b"abc"),
        (SubmitRequest, "choices", 2**31),
        (SubmitRequest, "deadline_unix_ms", -1),
        (Heartbeat, "worker.running_max", 0),
        (Heartbeat, "worker.page_tokens", 0),
        (Heartbeat, "worker.step_age_s", float("nan")),
        (Heartbeat, "streams", [{"receiver": "x", "seq": 1}] * 1025),
        (KvReplayed, "worker.instance", ""),
        (PutPages, "pages.0.claim.digest", b"short"),
        (AbortRequests, "prefix", "x" * 70_000),
        (ErrorReply, "retry_after_s", float("nan")),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else None,
)
def test_hostile_message_is_refused_when_it_is_decoded(
    message: type[Message], path: str, value: object
) -> None:
    assert decode(encode(EXAMPLES[message]), (message,))
    with pytest.raises(MalformedMessage):
        decode(altered(message, path, value), (message,))
