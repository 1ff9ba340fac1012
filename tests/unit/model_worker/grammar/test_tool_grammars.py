"""Whatever a grammar of calls lets a model say, the parser of the same plan reads as calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from tests.unit.model_worker.grammar.speaker import accepts, guide_of, speak

from antiphon.gateway.parsing.answer import AnswerParser, parse
from antiphon.gateway.parsing.formats import TOOL_FORMATS, reasoning_format
from antiphon.gateway.parsing.grammars import after_thinking
from antiphon.gateway.parsing.tools.choice import ToolPlan, plan_tools, read_choice
from antiphon.gateway.parsing.tools.json_calls import JSON_CALLS
from antiphon.gateway.parsing.tools.tool import read_tools
from antiphon.model_worker.grammar.source import source_of
from antiphon.model_worker.grammar.xgrammar_backend import XgrammarCompiler, XgrammarGrammar
from antiphon.wire.base import FinishReason
from antiphon.wire.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from antiphon.gateway.parsing.events import Parsed
    from antiphon.gateway.parsing.tools.format import ToolFormat
    from antiphon.model_card.vocabulary import TokenVocabulary
    from antiphon.wire.schemas import Json

Compile = Callable[[Grammar], XgrammarGrammar]

TOOLS = read_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "strict": True,
                "parameters": {
                    "type": "object",
                    "$defs": {"unit": {"enum": ["C", "F"]}},
                    "properties": {"days": {"type": "integer"}, "unit": {"$ref": "#/$defs/unit"}},
                    "required": ["days", "unit"],
                    "additionalProperties": False,
                },
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
)
FORMED = [format_ for format_ in TOOL_FORMATS if format_.form]
FORMATS = [None, *FORMED]
NAMED: Json = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def compiled(compiler_of: Callable[..., XgrammarCompiler]) -> Compile:
    compiler = compiler_of()
    return lambda grammar: compiler.compile(source_of(grammar, 4))


def check(parsed: Parsed) -> None:
    for call in parsed.calls:
        assert call.complete
        arguments = json.loads(call.arguments)
        if call.name == "get_weather":
            assert set(arguments) == {"days", "unit"}
            assert isinstance(arguments["days"], int)
            assert arguments["unit"] in ("C", "F")
        else:
            assert call.name == "now"
            assert isinstance(arguments, dict)


def answers(plan: ToolPlan, grammar: Grammar, compiled: Compile, vocabulary: TokenVocabulary):
    ready = compiled(grammar)
    for seed in range(12):
        said = speak(guide_of(ready, vocabulary), vocabulary, seed=seed, closers=b'"]}>')
        if said.finish is not None:
            assert said.finish.reason is FinishReason.STOP
            yield said.text.decode()


@pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f.names[0] if f else "json")
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_required_calls_are_calls_and_nothing_else(
    format_, choice: Json, compiled: Compile, vocabulary: TokenVocabulary
):
    plan = plan_tools(TOOLS, read_choice(choice, TOOLS), format_, parallel=True)
    assert plan.grammar is not None
    said = 0
    for text in answers(plan, plan.grammar, compiled, vocabulary):
        parsed = parse(AnswerParser(tools=plan.format, offer=plan.offer()), list(text))
        assert parsed.content == ""
        assert parsed.calls
        check(parsed)
        if choice == NAMED:
            assert [call.name for call in parsed.calls] == ["get_weather"]
        said += 1
    assert said >= 4


@pytest.mark.parametrize("format_", FORMED, ids=lambda f: f.names[0])
def test_without_parallel_calls_there_is_one(
    format_, compiled: Compile, vocabulary: TokenVocabulary
):
    plan = plan_tools(TOOLS, read_choice("required", TOOLS), format_, parallel=False)
    assert plan.grammar is not None
    for text in answers(plan, plan.grammar, compiled, vocabulary):
        parsed = parse(AnswerParser(tools=plan.format, offer=plan.offer()), [text])
        assert len(parsed.calls) == 1


def test_one_call_in_a_list_without_parallel_calls(compiled: Compile, vocabulary: TokenVocabulary):
    plan = plan_tools(TOOLS, read_choice("required", TOOLS), None, parallel=False)
    assert plan.grammar is not None
    for text in answers(plan, plan.grammar, compiled, vocabulary):
        assert len(json.loads(text)) == 1


@pytest.mark.parametrize("format_", FORMED, ids=lambda f: f.names[0])
def test_a_strict_tools_calls_keep_to_its_schema_in_free_text(
    format_, compiled: Compile, vocabulary: TokenVocabulary
):
    plan = plan_tools(TOOLS, read_choice("auto", TOOLS), format_, parallel=True)
    assert plan.grammar is not None
    form = format_.form
    ready = compiled(plan.grammar)
    beginning = f"Well.\n{form.begin}get_weather{form.middle}"
    assert accepts(ready, vocabulary, beginning)
    assert not accepts(ready, vocabulary, f"{beginning}x")
    for mark in form.excludes:  # the reader would see a call behind it, held to nothing
        assert not accepts(ready, vocabulary, f"Well. {mark}")


def test_a_list_of_calls_keeps_to_strict_schemas_or_is_no_json(
    compiled: Compile, vocabulary: TokenVocabulary
):
    plan = plan_tools(TOOLS, read_choice("auto", TOOLS), JSON_CALLS, parallel=True)
    assert plan.grammar is not None
    ready = compiled(plan.grammar)
    assert accepts(
        ready, vocabulary, '[{"name": "get_weather", "parameters": {"days": 3, "unit": "C"}}]'
    )
    assert accepts(ready, vocabulary, '[{"name": "now", "parameters": {"any": [1]}}]')
    assert accepts(ready, vocabulary, "Well: [1] and {2}.")
    for loose in (
        '[{"name": "get_weather", "parameters": {"days": "',
        '{"name": "get_weather"',
        ' {"name"',
        '[{"name": "other"',
    ):
        assert not accepts(ready, vocabulary, loose), loose
    for text in answers(plan, plan.grammar, compiled, vocabulary):
        check(parse(AnswerParser(tools=plan.format, offer=plan.offer()), list(text)))


@pytest.mark.parametrize("format_", FORMED, ids=lambda format_: format_.names[0])
@pytest.mark.parametrize(
    "form",
    [
        Grammar(
            kind=GrammarKind.JSON_SCHEMA,
            text='{"type": "object", "properties": {"sum": {"type": "integer"}},'
            ' "required": ["sum"], "additionalProperties": false}',
        ),
        Grammar(kind=GrammarKind.REGEX, text=r"\{\"sum\": [0-9]+\}"),
        Grammar(kind=GrammarKind.EBNF, text='root ::= "{\\"sum\\": 5}"'),
    ],
    ids=lambda form: form.kind.value,
)
def test_form_of_an_answer_goes_with_calls(
    format_: ToolFormat, form: Grammar, compiled: Compile, vocabulary: TokenVocabulary
):
    plan = plan_tools(TOOLS, read_choice("auto", TOOLS), format_, parallel=True, constraint=form)
    only = plan_tools(TOOLS, read_choice("required", TOOLS), format_, parallel=True)
    assert plan.grammar is not None
    assert only.grammar is not None
    ready = compiled(plan.grammar)
    assert accepts(ready, vocabulary, '{"sum": 5}')
    assert not accepts(ready, vocabulary, '{"total')
    assert not accepts(ready, vocabulary, "Well")
    for text in answers(plan, only.grammar, compiled, vocabulary):
        assert accepts(ready, vocabulary, text)
        check(parse(AnswerParser(tools=plan.format, offer=plan.offer()), list(text)))


OBJECTS = {
    GrammarKind.JSON_OBJECT: "",
    GrammarKind.JSON_SCHEMA: '{"type": "object"}',
    GrammarKind.REGEX: r"\{\}",
    GrammarKind.EBNF: 'root ::= "{}"',
    GrammarKind.STRUCTURAL_TAG: '{"format": {"type": "const_string", "value": "{}"}}',
}


def test_every_kind_of_grammar_has_one_of_an_object() -> None:
    assert OBJECTS.keys() == set(GrammarKind)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("kind", "text"), OBJECTS.items())
def test_thinking_comes_before_a_grammar(
    inside: bool, kind: GrammarKind, text: str, compiled: Compile, vocabulary: TokenVocabulary
):
    format_ = reasoning_format("qwen3")
    grammar = after_thinking(Grammar(kind=kind, text=text), format_, inside=inside, end_id=None)
    ready = compiled(grammar)
    answer = "so it is</think>\n\n{}" if inside else "<think>so it is</think>\n\n{}"
    for text in [answer] if inside else [answer, "{}"]:
        assert accepts(ready, vocabulary, text), text
    assert accepts(ready, vocabulary, "x") is inside


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "(yes|no)"),
        (GrammarKind.EBNF, 'root ::= "yes" | "no"'),
        (GrammarKind.STRUCTURAL_TAG, '{"format": {"type": "const_string", "value": "yes"}}'),
    ],
)
def test_answer_without_thinking_begins_with_no_white_space(
    kind: GrammarKind, text: str, compiled: Compile, vocabulary: TokenVocabulary
):
    format_ = reasoning_format("qwen3")
    grammar = after_thinking(Grammar(kind=kind, text=text), format_, inside=False, end_id=None)
    ready = compiled(grammar)

    assert accepts(ready, vocabulary, "yes")
    assert accepts(ready, vocabulary, "<think>x</think>\n\nyes")
    assert not accepts(ready, vocabulary, "\n")


def test_a_grammar_begins_after_the_token_that_ends_thinking():
    grammar = Grammar(kind=GrammarKind.JSON_OBJECT)
    format_ = reasoning_format("deepseek-r1")
    made = after_thinking(grammar, format_, inside=True, end_id=7)
    assert made == Grammar(kind=GrammarKind.JSON_OBJECT, begins_after=(7,))


def test_special_tokens_are_in_no_grammar():
    grammar = Grammar(kind=GrammarKind.JSON_OBJECT)
    made = after_thinking(grammar, reasoning_format("gpt-oss"), inside=False, end_id=7)
    assert made == grammar
