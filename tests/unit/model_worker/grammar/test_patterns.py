"""Patterns are written anew for the compiler, and mean what they meant."""

from __future__ import annotations

import random
import re

import pytest
from tests.unit.model_worker.grammar.schemas import random_pattern

from antiphon.model_worker.grammar.schema import ascii_pattern


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
