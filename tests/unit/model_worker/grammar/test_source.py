"""What a grammar may be, found out before it is compiled."""

from __future__ import annotations

import contextlib
import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.model_worker.grammar.json_schemas import random_pattern

from antiphon.model_worker.grammar.source import GrammarSource, ascii_pattern, source_of
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.sampling import Grammar, GrammarKind

STRING = {"type": "string"}
OBJECT = {"type": "object", "properties": {"a": STRING}}


def of(kind: GrammarKind, text: str) -> GrammarSource:
    return source_of(Grammar(kind=kind, text=text), 8)


def schema_of(schema: object) -> object:
    return json.loads(of(GrammarKind.JSON_SCHEMA, json.dumps(schema)).text)


def test_any_object_is_a_schema() -> None:
    assert of(GrammarKind.JSON_OBJECT, "") == GrammarSource(
        GrammarKind.JSON_SCHEMA, '{"type": "object"}'
    )


def test_two_spellings_of_a_schema_are_compiled_once() -> None:
    spaced = of(GrammarKind.JSON_SCHEMA, '{ "type":\n"object" }')
    assert spaced == of(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.REGEX, "", "the text is empty"),
        (GrammarKind.JSON_OBJECT, "{}", "json_object takes at most 0 characters"),
        (GrammarKind.REGEX, "a\0b", "NUL"),
        (GrammarKind.EBNF, 'root ::= "\0"', "NUL"),
        (GrammarKind.REGEX, "a" * 8193, "regex takes at most 8192 characters"),
        (GrammarKind.EBNF, "a" * 32_769, "ebnf takes at most 32768 characters"),
        (GrammarKind.JSON_SCHEMA, "{", "not JSON"),
        (GrammarKind.JSON_SCHEMA, "3", "not a schema"),
        (GrammarKind.JSON_SCHEMA, "[" * 100_000, "nested too deep"),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 200 + "{}" + "}" * 200, "nested too deep"),
        (GrammarKind.STRUCTURAL_TAG, "[]", "a structural tag is a JSON object"),
        (GrammarKind.STRUCTURAL_TAG, '{"structures": 3}', "structures is a list"),
        (GrammarKind.STRUCTURAL_TAG, '{"structures": [3]}', "a structure is a JSON object"),
        (GrammarKind.STRUCTURAL_TAG, '{"format": {"type": "token", "token": 3}}', "token is not"),
        (
            GrammarKind.STRUCTURAL_TAG,
            json.dumps({"format": {"type": "regex", "pattern": "a" * 9000}}),
            "pattern has 9000 characters",
        ),
        (
            GrammarKind.STRUCTURAL_TAG,
            json.dumps({"format": {"type": "json_schema", "json_schema": {"not": {}}}}),
            "not is not supported",
        ),
        (
            GrammarKind.STRUCTURAL_TAG,
            '{"format": ' + '{"elements": [' * 100 + "]}" * 100 + "}",
            "nested too deep",
        ),
    ],
)
def test_what_is_absurd_is_refused_with_a_reason(
    kind: GrammarKind, text: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        of(kind, text)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": STRING}, "#: not is not supported"),
        ({"if": STRING, "then": STRING}, "#: if is not supported"),
        ({"type": "array", "items": STRING, "uniqueItems": True}, "uniqueItems is not supported"),
        ({"type": "array", "contains": STRING}, "contains is not supported"),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired is not supported"),
        ({"properties": {"a": {"not": {}}}}, "#/properties/a: not is not supported"),
        ({"anyOf": [STRING, {"not": {}}]}, "#/anyOf/1: not is not supported"),
        ({"$defs": {"x": {"not": {}}}}, "#/\\$defs/x: not is not supported"),
        ({"items": {"additionalProperties": {"not": {}}}}, "#/items/additionalProperties: not"),
        ({"allOf": [STRING, STRING]}, "allOf of several schemas is not supported"),
        ({"anyOf": [STRING], "minLength": 3}, "minLength beside anyOf is not supported"),
        ({"enum": ["a"], "const": "a"}, "enum beside const is not supported"),
        ({"$ref": "http://x/y"}, "must point into the schema itself"),
        ({"minLength": 3}, 'minLength needs "type": "string"'),
        ({"minimum": 3}, 'minimum needs "type": "number"'),
        ({"required": ["a"]}, 'required needs "type": "object"'),
        ({"minItems": 1}, 'minItems needs "type": "array"'),
        ({"type": "number", "multipleOf": 2}, "multipleOf is supported for integers only"),
        ({"type": "integer", "multipleOf": 2, "minimum": 3}, "multipleOf beside bounds"),
        ({**STRING, "pattern": "a", "maxLength": 3}, "maxLength beside pattern"),
        ({**STRING, "format": "date", "maxLength": 3}, "maxLength beside format"),
        ({**STRING, "format": "date", "pattern": "a"}, "format beside pattern"),
        ({**STRING, "format": "json-pointer"}, '"format": "json-pointer" is not supported'),
        ({**STRING, "pattern": 'a"'}, "may not name quotes"),
        ({**STRING, "pattern": r"a\\b"}, "may not name quotes"),
        ({**STRING, "pattern": r"a\n"}, "may not name quotes"),
        ({**STRING, "pattern": r"\x22"}, "may not name quotes"),
        ({**STRING, "pattern": r"\u0022"}, "may not name quotes"),
        ({"type": "object", "patternProperties": {'"': {}}}, "may not name quotes"),
        ({**STRING, "pattern": "a" * 9000}, "the limit is 8192"),
        ({**OBJECT, "required": ["b"]}, "required 'b' must be among the properties"),
        ({**OBJECT, "patternProperties": {"x": {}}}, "patternProperties beside properties"),
        ({"type": "array", "items": [STRING]}, "#/items: not a schema"),
        ({"type": "integer", "anyOf": [STRING]}, "type does not hold of all that stands beside it"),
        ({"type": "string", "const": 3}, "type does not hold"),
        ({"type": "string", "enum": [3]}, "enum has no value of the type"),
        ({"type": [], "enum": [3]}, "type names none"),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "#: oneOf is supported where no two",
        ),
        ({"oneOf": [OBJECT, {"type": "object"}]}, "oneOf is supported where no two"),
        ({"oneOf": [STRING, {"$ref": "#/$defs/x"}], "$defs": {"x": {}}}, "oneOf is supported"),
        ({"$ref": "#/x/y", "x": {"y": {"not": {}}}}, "#/x/y: not is not supported"),
        ({"items": {"$id": "https://other", "type": "string"}}, r"\$id is supported at the top"),
        ({"format": "date"}, 'format needs "type": "string"'),
        ({"$ref": "#/$defs/a", "$defs": {"a": STRING}, "format": "date"}, "format beside .ref"),
        ({"type": "object", "minProperties": 2}, "minProperties is not supported where names are"),
        (
            {**OBJECT, "additionalProperties": STRING, "minProperties": 2},
            "minProperties is not supported where names are free",
        ),
        (
            {"type": "object", "patternProperties": {"^a": {}, "b$": {}}},
            "patternProperties of several patterns",
        ),
    ],
)
def test_a_schema_that_an_answer_could_break_is_refused(schema: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        schema_of(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"title": "T", "description": "d", "x-note": 1, "type": "object", "properties": {}},
        {"properties": {"not": STRING, "if": STRING, "minLength": STRING}, "required": ["not"]},
        {"enum": [{"not": 1, "minLength": 2}, "uniqueItems"]},
        {"type": "string", "enum": ["a", "b"], "default": "a"},
        {"$ref": "#/$defs/a", "$defs": {"a": STRING}, "description": "d"},
        {"oneOf": [STRING, {"type": ["integer", "null"]}]},
        {"oneOf": [{"const": "a"}, {"enum": ["b", 3]}]},
        {
            "type": "object",
            "oneOf": [
                {**OBJECT, "required": ["a"]},
                {"type": "object", "properties": {"b": STRING}, "required": ["b"]},
            ],
        },
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"anyOf": [{"type": "null"}, {"type": "integer"}]}],
            "$defs": {"a": STRING},
        },
        {"type": ["string", "null"], "anyOf": [STRING, {"type": "null"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, STRING]}}},
        {**OBJECT, "required": ["a"], "additionalProperties": STRING, "minProperties": 2},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": STRING}},
        {"type": "integer", "multipleOf": 5},
        {**STRING, "pattern": r'^[^"\\\n]+$'},
        {**STRING, "format": "a note of mine", "contentEncoding": "base64"},
        {"type": "array", "items": STRING, "uniqueItems": False},
        {"type": ["string", "null"], "pattern": "^a$"},
    ],
)
def test_what_is_held_or_only_a_remark_passes_as_it_is(schema: object) -> None:
    assert schema_of(schema) == schema


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ({"maxLength": 3}, "{0,3}"),
        ({"minLength": 2}, "{2,}"),
        ({"minLength": 2, "maxLength": 3}, "{2,3}"),
    ],
)
def test_the_length_of_a_string_becomes_a_pattern(lengths: dict[str, int], counts: str) -> None:
    pattern = r'^[^"\\\x00-\x1f]' + counts + "$"
    assert schema_of({**STRING, **lengths}) == {**STRING, "pattern": pattern}


def test_of_an_enum_beside_a_type_the_values_of_the_type_are_left() -> None:
    schema = {"type": ["string", "integer"], "enum": ["a", 1, 2.0, 2.5, None, True, ["a"]]}
    assert schema_of(schema) == {**schema, "enum": ["a", 1, 2.0]}


def test_a_tag_that_discriminates_a_union_is_always_required() -> None:
    def part(kind: str) -> dict[str, object]:
        return {"type": "object", "properties": {"a": STRING, "kind": {"const": kind}}}

    whole = {"oneOf": [{"$ref": "#/$defs/x"}, part("y")], "$defs": {"x": part("x")}}
    assert schema_of(whole) == {
        "oneOf": [{"$ref": "#/$defs/x"}, {**part("y"), "required": ["kind"]}],
        "$defs": {"x": {**part("x"), "required": ["kind"]}},
    }


def test_unions_of_unions_are_read_in_no_time() -> None:
    """Each level asks the one below twice, which would be two to the power of the levels."""

    def level(number: int) -> dict[str, object]:
        return {"anyOf": [{"$ref": f"#/$defs/{number + 1}"}] * 2}

    levels = {str(number): level(number) for number in range(200)} | {"200": STRING}
    union = {"oneOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}], "$defs": levels}
    with pytest.raises(InvalidRequest, match="oneOf is supported"):
        schema_of(union)


def test_white_space_has_a_bound_in_tags_that_set_none() -> None:
    def content(**more: object) -> dict[str, object]:
        return {"type": "json_schema", "json_schema": OBJECT, **more}

    parts = [content(), content(max_whitespace_cnt=2), content(style="qwen_xml")]
    tag = {"format": {"type": "sequence", "elements": parts}}
    written = json.loads(of(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)).text)
    assert written["format"]["elements"] == [
        content(max_whitespace_cnt=8),
        content(max_whitespace_cnt=2),
        content(style="qwen_xml"),
    ]


WORDS = [
    *("type", "format", "pattern", "minLength", "maxLength", "minimum", "multipleOf", "items"),
    *("prefixItems", "properties", "required", "additionalProperties", "patternProperties"),
    *("propertyNames", "enum", "const", "anyOf", "allOf", "$ref", "$defs", "json_schema"),
    *("oneOf", "$id", "minProperties", "#/$defs/a", "#/items", "x"),
    *("structures", "triggers", "elements", "content", "begin", "end", "style", "grammar", "tags"),
]
NONSENSE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from(["", "string", "object", "json_schema", "token", "date", "#", "[", *WORDS]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(NONSENSE)
def test_nonsense_is_refused_or_passes_and_nothing_else(value: object) -> None:
    for kind, text in (
        (GrammarKind.JSON_SCHEMA, json.dumps(value)),
        (GrammarKind.STRUCTURAL_TAG, json.dumps({"format": value})),
        (GrammarKind.STRUCTURAL_TAG, json.dumps({"structures": value})),
    ):
        with contextlib.suppress(InvalidRequest):
            of(kind, text)


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        (r"^\d+(\.\d{1,2})?$", r"^\d+(|\.\d{1,2})$"),
        ("(?:ab+)?c??", "(?:|ab+)c??"),
        ("(a(b)?|c){0,3}x", "(|(a(|b)|c){1,3})x"),
        ("(?<n>a){0,}", "(|(?<n>a){1,})"),
        (r"(a)??\(b?[()?]?", r"(|a)\(b?[()?]?"),
        ("é|[ü-👋]", r"\u{e9}|[\u{fc}-\u{1f44b}]"),
        (r"\é\\é", r"\u{e9}\\\u{e9}"),
        ("(a", "(a"),
        ("a)?", "a)?"),
    ],
)
def test_what_is_optional_is_a_choice_and_letters_have_numbers(pattern: str, written: str) -> None:
    assert ascii_pattern(pattern) == written


@pytest.mark.parametrize("seed", range(50))
def test_it_matches_the_same(seed: int) -> None:
    pattern = random_pattern(random.Random(seed), 4)
    numbers = re.compile(r"\\u\{([0-9a-f]+)\}")  # which Python writes otherwise
    written = numbers.sub(lambda found: f"\\U{int(found[1], 16):08x}", ascii_pattern(pattern))
    dice = random.Random(seed)
    for _ in range(200):
        text = "".join(dice.choices("aZ7é世👋 xb", k=dice.randint(0, 5)))
        assert bool(re.fullmatch(pattern, text)) == bool(re.fullmatch(written, text)), text
