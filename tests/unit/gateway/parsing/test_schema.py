"""The form of tool schemas is that of the metaschema, keyword by keyword."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from jsonschema import Draft202012Validator

from antiphon.gateway.parsing.tools import tool
from antiphon.gateway.parsing.tools.tool import checked_schema
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.wire.schemas import Json

METASCHEMA = Draft202012Validator(Draft202012Validator.META_SCHEMA)
VALUES: tuple[Json, ...] = (
    None, True, 1, -1, 1.5, "", "string", "strnig", "#/$defs/a", [], ["a"], ["a", "a"], [1], [{}],
    [["string"]], ["string", "null"], {}, {"a": {}}, {"a": 1}, {"a": {"type": "nil"}},
    {"type": "string"},
)  # fmt: skip
LENIENT = {"multipleOf": (-1,), "$id": ("#/$defs/a",), "$anchor": ("", "#/$defs/a")}


def accepts(value: Json) -> bool:
    try:
        checked_schema(value, "parameters")
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("keyword", sorted({*tool._FORMS, *tool._SINGLE, "type"}))
def test_form_of_a_keyword_is_that_of_the_metaschema(keyword: str) -> None:
    for value in VALUES:
        written: Json = {"properties": {"a": {keyword: value}}}
        expected = METASCHEMA.is_valid(written) or value in LENIENT.get(keyword, ())
        assert accepts(written) == expected, value
