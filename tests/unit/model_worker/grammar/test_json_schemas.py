"""What ends under a random JSON schema validates, by a validator that knows nothing of grammars."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

import pytest
from tests.unit.model_worker.grammar.json_schemas import (
    REFUSALS,
    check,
    form_of,
    random_json_schema,
)
from tests.unit.model_worker.grammar.speaker import accepts, guide_of, speak

from antiphon.model_worker.grammar.source import source_of
from antiphon.model_worker.grammar.xgrammar_backend import XgrammarCompiler, XgrammarGrammar
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.model_card.vocabulary import TokenVocabulary

VOICES = 3
END = 2
SHORT = b'abc"0123456789-.:,{}[]\\ xT'
"""What the values and names of the schemas are made of, so that they are met by chance."""


Compile = Callable[[object], XgrammarGrammar]


@pytest.fixture(scope="module")
def compiled(compiler_of: Callable[..., XgrammarCompiler]) -> Compile:
    compiler = compiler_of()
    return lambda schema: compiler.compile(source_of(form_of(schema), 20))


def compiled_or_refused(compiled: Compile, schema: object) -> XgrammarGrammar | str:
    try:
        return compiled(schema)
    except InvalidRequest as error:
        return error.message


@pytest.mark.parametrize("seed", range(60))
def test_what_ends_under_a_random_schema_validates(
    seed: int, compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    schema = random_json_schema(random.Random(seed))
    grammar = compiled_or_refused(compiled, schema)
    if isinstance(grammar, str):
        assert REFUSALS.search(grammar), grammar
        return
    for voice in range(VOICES):
        guide = guide_of(grammar, vocabulary)
        said = speak(guide, vocabulary, seed=voice, tokens_max=1200, often=SHORT)
        assert said.finish is not None, "it does not come to an end"
        assert said.finish.reason is FinishReason.STOP
        check(schema, said.text.decode())


@pytest.mark.parametrize("format_", ["date", "time", "date-time", "ipv4", "uuid", "email"])
def test_formats_are_those_of_public_readers(
    format_: str, compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    schema = {"type": "string", "format": format_}
    grammar = compiled(schema)
    # A brace only goes on with an address; the sign before its domain brings the end nearer.
    closers = b'"@'
    voices = [
        speak(guide_of(grammar, vocabulary), vocabulary, seed=voice, closers=closers)
        for voice in range(40)
    ]
    ended = [said for said in voices if said.finish is not None]
    assert len(ended) > 20
    for said in ended:
        check(schema, said.text.decode())
        if format_ == "date-time":
            datetime.fromisoformat(json.loads(said.text))
        if format_ == "time":
            datetime.fromisoformat(f"2000-01-01T{json.loads(said.text)}")


@pytest.mark.parametrize(
    ("pattern", "held", "broken"),
    [
        (r"^1(\.\d{1,2})?$", '"1.55"', '"155"'),
        ("^1(ab+){0,2}$", '"1abab"', '"1b"'),
        ("^é.$", '"éa"', '"é""'),
        ("^[^👋]$", '"a"', '"👋"'),
        ("^👋$", '"👋"', '"👋👋"'),
    ],
)
def test_patterns_are_held_where_the_compiler_would_not(
    pattern: str, held: str, broken: str, compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    grammar = compiled({"type": "string", "pattern": pattern})
    assert accepts(grammar, vocabulary, held, END)
    assert not accepts(grammar, vocabulary, broken, END)
