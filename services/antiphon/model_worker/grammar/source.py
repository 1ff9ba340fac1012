"""Grammars as they are compiled: checked and normalised.

The compiler silently ignores much of JSON Schema, so that an output could violate its schema: what
it cannot enforce is refused. Each rule here was found by trying; some may become unnecessary with a
later compiler.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.grammar.schema_types import SchemaTypes, type_of, types_named
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.sampling import GRAMMAR_TEXT_MAX, Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.wire.schemas import Json

DEPTH_MAX = 100
"""Deepest nesting of schemas."""
PATTERN_MAX = 8192
"""Longest regular expression: a run of optional parts compiles in cubic time."""
RULES_MAX = 32_768
"""Longest text of rules, for the reason of `PATTERN_MAX`."""
PROPERTIES_MAX = 1000
_CHARACTERS_MAX = {
    GrammarKind.JSON_SCHEMA: GRAMMAR_TEXT_MAX,
    GrammarKind.JSON_OBJECT: 0,
    GrammarKind.REGEX: PATTERN_MAX,
    GrammarKind.EBNF: RULES_MAX,
    GrammarKind.STRUCTURAL_TAG: GRAMMAR_TEXT_MAX,
}
_ANY_OBJECT = '{"type": "object"}'
_OF_TOKENS = frozenset(
    {"token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch"}
)


class GrammarSource(msgspec.Struct, frozen=True):
    """The compiler's input. Requests with equal sources share the compiled grammar."""

    kind: GrammarKind
    text: str


def source_of(
    grammar: Grammar | GrammarSource, whitespace_max: int, properties_max: int = PROPERTIES_MAX
) -> GrammarSource:
    """Check and normalise a grammar without compiling it.

    An `InvalidRequest` if it is empty, too long, or uses what the compiler cannot enforce.
    """
    kind, text = grammar.kind, grammar.text
    if kind is GrammarKind.JSON_OBJECT and not text:
        return GrammarSource(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
    if len(text) > _CHARACTERS_MAX[kind]:
        raise invalid_grammar(f"{kind} takes at most {_CHARACTERS_MAX[kind]} characters")
    if not text:
        raise invalid_grammar("the text is empty")
    if "\0" in text:  # the compiler would read past it
        raise invalid_grammar("the text contains a NUL character")
    if kind is GrammarKind.JSON_SCHEMA:
        schema = read_json(text)
        _check_properties(schema, properties_max)
        prepare_schema(schema)
        return GrammarSource(kind, msgspec.json.encode(schema).decode())
    if kind is GrammarKind.STRUCTURAL_TAG:
        tag = read_json(text)
        _check_properties(tag, properties_max)
        tag = _structural_tag(tag, whitespace_max)
        return GrammarSource(kind, msgspec.json.encode(tag).decode())
    return GrammarSource(kind, text)


def _check_properties(schema: Json, properties_max: int) -> None:
    """Refuse a schema with too many properties: compile time is quadratic in their number."""
    count, parts = 0, [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            properties = part.get("properties")
            count += len(properties) if isinstance(properties, dict) else 0
            parts += part.values()
    if count > properties_max:
        raise invalid_grammar(
            f"{count} properties, more than {properties_max} (grammar.properties_max)"
        )


def _structural_tag(tag: Json, whitespace_max: int) -> Json:
    """Free text with tags inside; a tag of `structures` and `triggers` becomes the newer form."""
    if not isinstance(tag, dict):
        raise invalid_grammar("a structural tag is a JSON object")
    format_ = _triggered(tag) if "structures" in tag else tag.get("format")
    return {"type": "structural_tag", "format": _node(format_, whitespace_max, 0)}


def _triggered(tag: dict[str, Json]) -> Json:
    """The older form: free text until a trigger, then one of the tags that begin with it."""
    structures = tag["structures"]
    if not isinstance(structures, list):
        raise invalid_grammar("structures is a list")
    tags: list[Json] = [_tag(structure) for structure in structures]
    return {"type": "triggered_tags", "triggers": tag.get("triggers", []), "tags": tags}


def _tag(structure: Json) -> Json:
    if not isinstance(structure, dict):
        raise invalid_grammar("a structure is a JSON object")
    return {
        "type": "tag",
        "begin": structure.get("begin"),
        "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
        "end": structure.get("end"),
    }


def _node(node: Json, whitespace_max: int, depth: int) -> Json:
    if depth > DEPTH_MAX:
        raise invalid_grammar("nested too deep")
    if isinstance(node, list):
        return [_node(part, whitespace_max, depth + 1) for part in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("type")
    if kind == "json_schema":
        return _content(node, whitespace_max)
    if isinstance(kind, str) and kind in _OF_TOKENS:
        # The tokens of tags are mostly special tokens, which have no text.
        raise invalid_grammar(f"{kind} is not supported; tags are found in the text")
    for word, characters_max in (("pattern", PATTERN_MAX), ("grammar", RULES_MAX)):
        length = len(str(node.get(word, "")))
        if length > characters_max:
            raise invalid_grammar(f"{word} has {length} characters; the limit is {characters_max}")
    return {word: _node(part, whitespace_max, depth + 1) for word, part in node.items()}


def _content(node: dict[str, Json], whitespace_max: int) -> Json:
    """JSON of a schema. The other styles are notations of certain models, with no free space."""
    if node.get("style", "json") != "json":
        return node
    prepare_schema(node.get("json_schema"))
    return {"max_whitespace_cnt": whitespace_max, **node}


def invalid_grammar(reason: str) -> InvalidRequest:
    return InvalidRequest(f"grammar: {reason}", param="grammar")


def read_json(text: str) -> Json:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise invalid_grammar(f"not JSON: {error}") from error
    except RecursionError:
        raise invalid_grammar("nested too deep") from None


def prepare_schema(schema: Json) -> None:
    """Rewrite a schema, in place, so that no output can violate it, or name what prevents that."""
    kinds = SchemaTypes(schema)
    seen: set[int] = set()
    waiting: list[tuple[str, Json]] = [("#", schema)]
    while waiting:
        place, whole = waiting.pop()
        if id(whole) in seen:
            continue
        for path, part in list(_parts(whole, place)):
            seen.add(id(part))
            for word, reason in _refusals(part, kinds):
                raise invalid_grammar(f"{path}: {word} {reason}")
            _add_patterns(part)
            reference = part.get("$ref")
            if isinstance(reference, str):
                # The target may be under a keyword that JSON Schema does not have.
                waiting.append((reference, kinds.resolve(reference)))


def _parts(schema: Json, path: str, depth: int = 0) -> Iterator[tuple[str, dict[str, Json]]]:
    """The schema and all schemas in it that constrain anything, each with its path."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise invalid_grammar(f"{path}: not a schema")
    if depth > DEPTH_MAX:
        raise invalid_grammar("nested too deep")
    yield path, schema
    for word, value in schema.items():
        inner: list[tuple[str, Json]] = []
        if word in _MAPS and isinstance(value, dict):
            # A name may be as long as the whole schema, and be in the paths of thousands of others.
            inner = [(name[:_NAME_SHOWN], part) for name, part in value.items()]
        elif word in _LISTS and isinstance(value, list):
            inner = [(str(index), part) for index, part in enumerate(value)]
        elif word in _SINGLE:
            inner = [("", value)]
        if word == "propertyNames" and isinstance(value, dict):
            value.setdefault("type", "string")  # property names are strings
        for name, part in inner:
            place = f"{path}/{word}/{name}".removesuffix("/")
            yield from _parts(part, place, depth + 1)


def _refusals(schema: dict[str, Json], kinds: SchemaTypes) -> Iterator[tuple[str, str]]:
    for word, value in schema.items():
        if word in _NEVER or (word == "uniqueItems" and value is True):
            yield word, "is not supported"
    if "$id" in schema and not kinds.is_root(schema):
        yield "$id", "is supported at the top only"
    yield from _alone(schema)
    yield from _typed(schema, kinds)
    yield from _one_of(schema, kinds)
    yield from _untyped(schema)
    yield from _numbers(schema)
    yield from _strings(schema)
    yield from _objects(schema)


def _alone(schema: dict[str, Json]) -> Iterator[tuple[str, str]]:
    """The compiler reads only one of the keywords that decide alone, and no keyword beside it."""
    deciding = [word for word in _DECIDING if word in schema]
    if not deciding:
        return
    beside = [word for word in schema if word in _OF_TYPE]
    if _format(schema) and deciding[0] not in ("const", "enum"):
        beside.append("format")  # beside listed values it is an annotation
    for word in deciding[1:] + beside:
        yield word, f"beside {deciding[0]} is not supported"
    for word in deciding:
        if schema[word] == [] and word != "const":
            yield word, "is empty"
    reference, every = schema.get("$ref", "#"), schema.get("allOf")
    if not isinstance(reference, str) or not reference.startswith("#"):
        yield "$ref", "must point into the schema itself"
    if isinstance(every, list) and len(every) > 1:
        yield "allOf", "of several schemas is not supported"


def _typed(schema: dict[str, Json], kinds: SchemaTypes) -> Iterator[tuple[str, str]]:
    """The compiler ignores a type beside a keyword that decides alone: it must add nothing."""
    if "type" not in schema:
        return
    types, values = types_named(schema["type"]), schema.get("enum")
    if not types:
        yield "type", "names none"
    if isinstance(values, list) and types:
        schema["enum"] = values = [value for value in values if type_of(value) in types]
        if not values:
            yield "enum", "has no value of the type"
    elif any(word in schema for word in _DECIDING) and not kinds.types(schema) <= types:
        yield "type", "does not hold of all that stands beside it"


def _one_of(schema: dict[str, Json], kinds: SchemaTypes) -> Iterator[tuple[str, str]]:
    """The compiler treats oneOf as anyOf: no two parts may match the same value.

    A property that discriminates between two parts is made required in both.
    """
    parts = schema.get("oneOf")
    if not isinstance(parts, list):
        return
    for one, other in combinations(parts, 2):
        if kinds.disjoint(one, other):
            continue
        if (name := kinds.discriminator(one, other)) is None:
            yield "oneOf", "is supported where no two parts can hold at once; anyOf may fit"
            return
        kinds.require(one, name)
        kinds.require(other, name)


def _untyped(schema: dict[str, Json]) -> Iterator[tuple[str, str]]:
    """Without a type the compiler ignores most keywords."""
    if "type" in schema or any(word in schema for word in _DECIDING):
        return
    if _format(schema):
        yield "format", 'needs "type": "string"'
    for word, type_ in _OF_TYPE.items():
        if word in schema and not any(inferring in schema for inferring in _INFERRING[type_]):
            yield word, f'needs "type": "{type_}"'


def _numbers(schema: dict[str, Json]) -> Iterator[tuple[str, str]]:
    if (step := schema.get("multipleOf")) is None:
        return
    if schema.get("type") != "integer" or not isinstance(step, int):
        yield "multipleOf", "is supported for integers only"
    if any(word in schema for word in _BOUNDS):
        yield "multipleOf", "beside bounds is not supported"


def _strings(schema: dict[str, Json]) -> Iterator[tuple[str, str]]:
    format_ = _format(schema)
    shaping = ["pattern"] * ("pattern" in schema) + ["format"] * (format_ is not None)
    lengths = [word for word in ("minLength", "maxLength") if word in schema]
    for word in (shaping[:1] and lengths) + shaping[1:]:
        yield word, f"beside {shaping[0]} is not supported"
    if format_ in _UNQUOTED_FORMATS:
        yield f'"format": "{format_}"', "is not supported"
    patterns = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
        if isinstance(pattern, str) and len(pattern) > PATTERN_MAX:
            yield "pattern", f"has {len(pattern)} characters; the limit is {PATTERN_MAX}"
        if isinstance(pattern, str) and _ESCAPED.search(_OTHERS.sub("", pattern)):
            # The pattern is applied to the JSON encoding of the string, where these are escaped.
            yield "pattern", "may not name quotes, backslashes and control characters"


def _format(schema: dict[str, Json]) -> str | None:
    """The format of a schema, if it is one that is enforced."""
    format_ = schema.get("format")
    return format_ if isinstance(format_, str) and format_ in _FORMATS else None


def _add_patterns(schema: dict[str, Json]) -> None:
    """Express the length of strings, and some of their formats, as a pattern.

    With its own keywords the compiler allows raw control characters, which no JSON string may
    contain. Nor does it support a literal `true` among the first items.
    """
    first = schema.get("prefixItems")
    if isinstance(first, list):
        schema["prefixItems"] = [{} if part is True else part for part in first]
    format_ = _format(schema)
    if format_ in FORMAT_PATTERNS and "type" in schema:
        del schema["format"]
        schema["pattern"] = FORMAT_PATTERNS[format_]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if isinstance(least, int) and (isinstance(most, int) or most == "") and (least or most != ""):
        schema.pop("minLength", None)
        schema.pop("maxLength", None)
        schema["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{least},{most}}}$'
    pattern, patterns = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        schema["pattern"] = ascii_pattern(pattern)
    if isinstance(patterns, dict):
        schema["patternProperties"] = {ascii_pattern(name): part for name, part in patterns.items()}


def _objects(schema: dict[str, Json]) -> Iterator[tuple[str, str]]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if isinstance(properties, dict) and isinstance(required, list):
        for name in required:
            if not isinstance(name, str) or name not in properties:
                yield f"required {name!r}", "must be among the properties"
    patterns = schema.get("patternProperties")
    if properties:
        for word in ("patternProperties", "propertyNames"):
            if word in schema:
                yield word, "beside properties is not supported"
    if isinstance(patterns, dict) and len(patterns) > 1:
        # A name may match several patterns, but only one of them is enforced.
        yield "patternProperties", "of several patterns is not supported"
    if _names_repeat(schema):
        # A repeated name counts twice in the grammar, but is one property once parsed.
        yield "minProperties", "is not supported where names are free"


def _names_repeat(schema: dict[str, Json]) -> bool:
    """Whether unlisted names are needed to reach `minProperties`, and more than one of them."""
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    free = not schema.get("properties") or bool(
        schema.get("additionalProperties") or schema.get("unevaluatedProperties")
    )
    listed = len(required) if isinstance(required, list) else 0
    return free and isinstance(least, int) and least > listed + 1


def ascii_pattern(pattern: str) -> str:
    """The same pattern in ASCII, with each optional group as a choice of nothing or the group.

    The compiler parses patterns of JSON strings with other code than standalone regular
    expressions. That code lets quotes through where a non-ASCII letter is not escaped, and goes
    wrong past the beginning of an optional group whose end repeats: `1(a[0-9]+)?` also matched 155.
    """
    output: list[str] = []
    opened: list[int] = []
    ended: int | None = None  # start of the group that has just been closed
    for token in _TOKEN.finditer(pattern):
        text, group, ended = token[0], ended, None
        if text == ")" and opened:
            ended = opened.pop()
        elif text[0] == "(":
            opened.append(len(output))
        elif group is not None and text in ("?", "??"):
            output[group] += "|"
            continue
        elif group is not None and token["most"] is not None:
            output[group] = f"(|{output[group]}"
            text = f"{{1,{token['most']}}})"
        output.append(_CHARACTER.sub(_numbered, text))
    return "".join(output)


def _numbered(found: re.Match[str]) -> str:
    text = found[0]
    return text if text.isascii() else f"\\u{{{ord(text[-1]):x}}}"


_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset(
    {"items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"}
)
_NEVER = frozenset(
    {
        "not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies",
        "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
_DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPE = {
    **dict.fromkeys(("minLength", "maxLength", "pattern"), "string"),
    **dict.fromkeys((*_BOUNDS, "multipleOf"), "number"),
    **dict.fromkeys(
        (
            "properties", "additionalProperties", "unevaluatedProperties", "patternProperties",
            "propertyNames", "required", "minProperties", "maxProperties",
        ),
        "object",
    ),
    **dict.fromkeys(
        ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"), "array"
    ),
}  # fmt: skip
"""The keywords that apply to values of one type only, with that type."""
_INFERRING = {
    "string": (),
    "number": (),
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
"""Keywords that imply a type where `type` is missing."""
_UNQUOTED_FORMATS = frozenset({"json-pointer", "relative-json-pointer"})
_FORMATS = _UNQUOTED_FORMATS | {
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "uri-template", "uuid",
}  # fmt: skip
"""Formats that are enforced; any other is an annotation, as in JSON Schema."""
_NAME_SHOWN = 32
_OTHERS = re.compile(r"\[\^(?:\\.|[^\]\\]){0,256}\]")
"""Bounded, or a run of unclosed brackets would be scanned again from each of them."""
_ESCAPED = re.compile(r"[\"\x00-\x1f]|\\[\\nrtfv0c]|\\x(?:[01]|22|5[cC])|\\u00(?:[01]|22|5[cC])")
_TOKEN = re.compile(
    r"""
      \\. | \[ (?: \\. | [^\]\\] )* \]            # an escape; a class
    | \( (?: \?: | \?<\w+> )? | \)                # a group
    | \?\?? | \{0,(?P<most>\d*)\}\??              # it may be left out
    | .
    """,
    re.DOTALL | re.VERBOSE,
)
_CHARACTER = re.compile(r"\\.|[^\x00-\x7f]", re.DOTALL)

_SHORT_OF_400 = "0[48]|[2468][048]|[13579][26]"
_LEAP_YEAR = f"[0-9]{{2}}({_SHORT_OF_400})|({_SHORT_OF_400})00"
_YEAR = "000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3}"
_DAY = (
    "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8])"
)
_DATE = f"(({_YEAR})-({_DAY})|({_LEAP_YEAR})-02-29)"
_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTE}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_MINUTE})"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"

FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^({_OCTET}\.){{3}}{_OCTET}$",
}
"""With its built-in formats the compiler accepts the 31st of February, impossible seconds, and
addresses with leading zeros, which some programs read as octal. Each of these is narrower than RFC
3339 and RFC 3986, section 3.2.2, only in leap seconds, the year 0 and small fractions."""
