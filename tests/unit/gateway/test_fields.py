"""Fields of bodies: an error names the field, and the values it may have where these are few."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
import pytest

from antiphon.gateway.http.core.fields import decode
from antiphon.wire.errors import InvalidRequest


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(msgspec.Struct):
    colour: Annotated[Colour, msgspec.Meta(description="Of a part.")] | None = None
    size: Literal["small", "large"] | int = "small"


class Body(msgspec.Struct, rename={"kind": "type"}):
    kind: Literal["a", "b"] = "a"
    parts: list[Inner | str] | Inner = []
    by_name: dict[str, Inner] = {}


@pytest.mark.parametrize(
    ("body", "param", "allowed"),
    [
        (b'{"type":"c"}', "type", "'a', 'b'"),
        (b'{"parts":[{},{"colour":"green"}]}', "parts[1].colour", "'red', 'blue'"),
        (b'{"parts":{"size":"huge"}}', "parts.size", "'large', 'small'"),
        (b'{"by_name":{"x":{"colour":"green"}}}', "by_name[...].colour", "'red', 'blue'"),
    ],
)
def test_error_lists_the_values_of_a_field_of_a_fixed_set(
    body: bytes, param: str, allowed: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(body, Body)
    assert raised.value.param == param
    assert raised.value.message.endswith(f"; allowed are {allowed}")


def test_error_lists_the_values_below_a_field_that_is_read_by_itself() -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(b'[{"colour":"green"}]', list[Inner], "parts")
    assert raised.value.message == (
        "parts[0].colour: Invalid enum value 'green'; allowed are 'red', 'blue'"
    )


def test_error_about_a_type_lists_no_values() -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(b'{"type":7}', Body)
    assert raised.value.message == "type: Expected `str`, got `int`"
