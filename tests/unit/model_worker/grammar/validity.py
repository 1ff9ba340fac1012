"""Whether an answer is of its schema, and which schemas are refused: what tests of both share."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from jsonschema import Draft202012Validator, FormatChecker

from antiphon.wire.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMATS = FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
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
"""All reasons for which a schema is refused. A word that nobody expects here would be a change."""


def form_of(schema: object) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))


def check(schema: Mapping[str, object] | bool, answer: str) -> None:
    validator = Draft202012Validator(schema, format_checker=FORMATS)
    validator.validate(json.loads(answer))
