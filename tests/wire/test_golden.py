"""The bytes of every message are those that were committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.bus_page import every_message
from tests.wire import golden
from tests.wire.examples import EVERY, EXAMPLES

from antiphon.wire.codec import decode, encode, encode_json, is_json
from antiphon.wire.errors import ErrorReply

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.wire.base import Message

CARRIED = {*every_message(), ErrorReply}


def each(message: Message) -> str:
    return type(message).__name__


def test_every_message_of_every_route_has_an_example_and_a_file() -> None:
    assert set(EXAMPLES) == CARRIED
    assert {path.stem for path in golden.FOLDER.iterdir()} == {m.__name__ for m in CARRIED}


@pytest.mark.parametrize("example", EVERY, ids=each)
def test_encoding_gives_the_committed_bytes(example: Message) -> None:
    assert golden.dump(encode(example)) == golden.path_of(type(example)).read_text()


@pytest.mark.parametrize("example", EVERY, ids=each)
def test_committed_bytes_decode_to_the_example(example: Message) -> None:
    committed = golden.load(golden.path_of(type(example)).read_text())
    assert decode(committed, (type(example),)) == example


@pytest.mark.parametrize("example", EVERY, ids=each)
def test_json_gives_the_same_message(example: Message) -> None:
    payload = encode_json(example)
    assert is_json(payload)
    assert not is_json(encode(example))
    assert decode(payload, (type(example),)) == example


@pytest.mark.parametrize("example", EVERY, ids=each)
def test_example_sets_every_field(example: Message) -> None:
    unset = [
        f"{type(struct).__name__}.{field.name}"
        for struct in structs_in(example)
        for field in msgspec.structs.fields(struct)
        if getattr(struct, field.name) == default_of(field)
    ]
    assert not unset


@given(st.binary())
def test_golden_text_loses_nothing(payload: bytes) -> None:
    assert golden.load(golden.dump(payload)) == payload


def default_of(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def structs_in(value: object) -> Iterator[msgspec.Struct]:
    if isinstance(value, msgspec.Struct):
        yield value
        for field in value.__struct_fields__:
            yield from structs_in(getattr(value, field))
    elif isinstance(value, tuple):
        items: tuple[Any, ...] = value
        for item in items:
            yield from structs_in(item)
