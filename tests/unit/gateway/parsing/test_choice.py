"""Tools and the choice among them: what is refused, and what a request comes to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.parsing.renderers import FORMATS

from antiphon.gateway.parsing.formats import tool_format
from antiphon.gateway.parsing.tools.choice import Mode, ToolChoice, plan_tools, read_choice
from antiphon.gateway.parsing.tools.json_calls import JSON_CALLS
from antiphon.gateway.parsing.tools.tool import TOOLS_MAX, Tool, read_tools
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.sampling import GrammarKind

if TYPE_CHECKING:
    from antiphon.gateway.parsing.tools.format import ToolFormat
    from antiphon.wire.schemas import Json

HERMES = tool_format("hermes")


def function(name: Json = "f", **more: Json) -> Json:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = read_tools([function("f"), function("g")])
MANY = read_tools([function(f"f{n}") for n in range(100)])
NOT_A_CHOICE = "tool_choice must be 'auto', 'none', 'required'"


@pytest.mark.parametrize(
    ("tool", "param", "message"),
    [
        ("f", "tools[0]", "a tool must be an object"),
        ({"type": "web_search"}, "tools[0].type", "only tools of type 'function'"),
        ({"type": "function"}, "tools[0].function", "must be an object"),
        (function(None), "tools[0].function.name", "a name must have 1 to 128"),
        (function("two words"), "tools[0].function.name", "a name must have 1 to 128"),
        (function("x" * 129), "tools[0].function.name", "a name must have 1 to 128"),
        (function(description=3), "tools[0].function.description", "must be a string"),
    ],
)
def test_a_tool_that_is_none_is_refused_by_its_place(tool: Json, param: str, message: str):
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_tools([tool])
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([], ": parameters must be a JSON schema, which is an object"),
        ({"type": "array"}, r'\.type: must be "object"'),
        ({"properties": []}, r"\.properties: must be an object"),
        (
            {"properties": {"a": {"type": "strnig"}}},
            r"\.properties\.a\.type: 'strnig' is not a type; the types are array, boolean, "
            "integer, null, number, object, string; the schema of function 'f' is invalid",
        ),
        (
            {"properties": {"a": {"anyOf": [3]}}},
            r"\.properties\.a\.anyOf\.0: a schema must be an object",
        ),
        ({"required": ["a", "a"]}, r"\.required: must be a list of distinct names"),
        (
            {"properties": {"a": {"minLength": -1}}},
            r"\.properties\.a\.minLength: must be a non-negative integer",
        ),
        ({"properties": {"a": {"maximum": True}}}, r"\.properties\.a\.maximum: must be a number"),
        ({"properties": {"a": {"pattern": 1}}}, r"\.properties\.a\.pattern: must be a string"),
    ],
)
def test_invalid_schema_is_refused_by_the_path_inside_it(parameters: Json, message: str):
    at = "tools[0].function.parameters"
    with pytest.raises(InvalidRequest, match=re.escape(at) + message) as caught:
        read_tools([function(parameters=parameters)])
    assert caught.value.param == at


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(InvalidRequest, match="another tool is also named 'f'") as caught:
        read_tools([function("f"), function("g"), function("f")])
    assert caught.value.param == "tools[2].function.name"


def test_a_schema_nested_too_deep_and_too_many_tools_are_refused():
    schema: Json = {"type": "object"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidRequest, match="nested too deep"):
        read_tools([function(parameters=schema)])
    with pytest.raises(InvalidRequest, match=f"{TOOLS_MAX} are allowed"):
        read_tools([function(f"f{n}") for n in range(TOOLS_MAX + 1)])


def test_types_of_databases_are_understood():
    parameters: Json = {
        "type": "dict",
        "properties": {"a": {"type": "VARCHAR"}, "b": {"type": "int"}},
    }
    (tool,) = read_tools([function(parameters=parameters)])
    assert tool.parameters == {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
    }


def test_the_template_sees_what_the_client_wrote_and_not_that_it_is_strict():
    written = function(description="D", parameters={"type": "object"}, strict=True)
    (tool,) = read_tools([written])
    assert tool.strict
    assert tool.written == function(description="D", parameters={"type": "object"})


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (None, ToolChoice(Mode.AUTO)),
        ("auto", ToolChoice(Mode.AUTO)),
        ("none", ToolChoice(Mode.NONE)),
        ("required", ToolChoice(Mode.REQUIRED)),
        (function("g"), ToolChoice(Mode.REQUIRED, "g")),
        ({"type": "function", "name": "g"}, ToolChoice(Mode.REQUIRED, "g")),
    ],
)
def test_a_choice_is_read(choice: Json, read: ToolChoice):
    assert read_choice(choice, TOOLS) == read


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_without_tools_there_is_no_choice(choice: Json):
    assert read_choice(choice, ()) == ToolChoice(Mode.NONE)


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("any", TOOLS, NOT_A_CHOICE),
        (3, TOOLS, NOT_A_CHOICE),
        ({"type": "function"}, TOOLS, NOT_A_CHOICE),
        ({"type": "custom", "name": "f"}, TOOLS, NOT_A_CHOICE),
        (function("h"), TOOLS, "unknown tool 'h'; available tools are 'f', 'g'"),
        (function("h"), MANY, r"available tools are 'f0', .*'f15' and 84 more$"),
        (function("h"), (), "unknown tool 'h'; no tools are available"),
        ("required", (), "requires tools"),
    ],
)
def test_a_choice_that_is_none_is_refused(choice: Json, tools: tuple[Tool, ...], message: str):
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_choice(choice, tools)
    assert caught.value.param == "tool_choice"


def test_auto_parses_and_holds_nothing():
    plan = plan_tools(TOOLS, ToolChoice(Mode.AUTO), HERMES, parallel=True)
    assert (plan.tools, plan.format, plan.grammar, plan.calls_max) == (TOOLS, HERMES, None, None)


def test_auto_without_a_format_is_refused():
    with pytest.raises(Unsupported, match="the tool call format of this model is unknown"):
        plan_tools(TOOLS, ToolChoice(Mode.AUTO), None, parallel=True)


def test_a_strict_tool_is_held_in_auto_where_a_grammar_can_write_it():
    strict = read_tools([function("f", strict=True)])
    assert plan_tools(strict, ToolChoice(Mode.AUTO), HERMES, parallel=True).grammar is not None
    assert plan_tools(strict, ToolChoice(Mode.AUTO), JSON_CALLS, parallel=True).grammar is not None


@pytest.mark.parametrize("format_", FORMATS)
def test_a_strict_tool_is_held_or_refused_in_auto(format_: ToolFormat):
    strict = read_tools([function("loose"), function("f", strict=True)])
    held = format_.form is not None or format_ is JSON_CALLS
    if held:
        assert plan_tools(strict, ToolChoice(Mode.AUTO), format_, parallel=True).grammar
        return
    with pytest.raises(Unsupported, match="no grammar can produce") as refused:
        plan_tools(strict, ToolChoice(Mode.AUTO), format_, parallel=True)
    assert refused.value.param == "tools[1].function.strict"
    lenient = plan_tools(
        strict, ToolChoice(Mode.AUTO), format_, parallel=True, requires_strict=False
    )
    assert lenient.grammar is None
    assert plan_tools(strict, ToolChoice(Mode.REQUIRED), format_, parallel=True).grammar
    loose = plan_tools(strict[:1], ToolChoice(Mode.AUTO), format_, parallel=True)
    assert loose.grammar is None


def test_none_shows_no_tools_and_parses_nothing():
    plan = plan_tools(TOOLS, ToolChoice(Mode.NONE), HERMES, parallel=True)
    assert (plan.tools, plan.format, plan.grammar) == ((), None, None)


@pytest.mark.parametrize("format_", FORMATS)
def test_required_is_held_in_the_format_if_a_grammar_can_write_it_and_else_as_json(format_):
    plan = plan_tools(TOOLS, ToolChoice(Mode.REQUIRED), format_, parallel=True)
    assert plan.grammar is not None
    assert plan.format is (format_ if format_.form else JSON_CALLS)
    kind = GrammarKind.STRUCTURAL_TAG if format_.form else GrammarKind.JSON_SCHEMA
    assert plan.grammar.kind is kind


def test_a_named_tool_is_called_once_and_the_template_sees_all():
    plan = plan_tools(TOOLS, ToolChoice(Mode.REQUIRED, "g"), None, parallel=True)
    assert plan.grammar is not None
    assert '"f"' not in plan.grammar.text
    assert (plan.tools, plan.calls_max) == (TOOLS, 1)


def test_without_parallel_calls_one_counts():
    assert plan_tools(TOOLS, ToolChoice(Mode.AUTO), HERMES, parallel=False).calls_max == 1


def test_definitions_that_differ_are_refused_where_they_meet():
    tools = read_tools(
        [
            function("f", parameters={"type": "object", "$defs": {"x": {"type": "string"}}}),
            function("g", parameters={"type": "object", "$defs": {"x": {"type": "null"}}}),
        ]
    )
    with pytest.raises(InvalidRequest, match="define 'x' differently"):
        plan_tools(tools, ToolChoice(Mode.REQUIRED), None, parallel=True)


def test_an_unknown_parser_is_refused_with_those_there_are():
    with pytest.raises(InvalidRequest, match="unknown tool call parser 'x'; available are apertus"):
        tool_format("x")
