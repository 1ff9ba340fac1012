"""Tokens of a transcript become words, as in transformers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from transformers.models.whisper import tokenization_whisper

from antiphon.gateway.http.openai.words import TimedPiece, Word, words_of

if TYPE_CHECKING:
    from collections.abc import Sequence

SYLLABLES = (
    *((b" the",), (b" wo", b"rld"), (b".",), (b",",), (b' "',), (b'"',), (b" (",), (b")",)),
    *((b"'s",), (b" \xc3", b"\xbc", b"ber"), (b" \xe4", b"\xbd", b"\xa0"), (b"\xe5\xa5\xbd",)),
    *((b"\xe3\x80\x82",), (b" ",), (b"!",), (b" -",), (b"ing",), (b" 3", b".", b"5")),
)


class Spelled:
    """A tokenizer of transformers' functions, whose tokens are the indices of these pieces."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self.eos_token_id = len(pieces)

    def decode(self, tokens: Sequence[int], *, decode_with_timestamps: bool) -> str:
        assert decode_with_timestamps
        return b"".join(self._pieces[token] for token in tokens).decode(errors="replace")


def timed(pieces: Sequence[bytes]) -> list[TimedPiece]:
    return [TimedPiece(piece, float(at), at + 1.0) for at, piece in enumerate(pieces)]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("language", ["english", "chinese"])
def test_words_are_those_of_transformers(seed: int, language: str) -> None:
    chosen = random.Random(seed).choices(SYLLABLES, k=12)
    pieces = [piece for syllable in chosen for piece in syllable]
    texts, _, places = tokenization_whisper._combine_tokens_into_words(
        Spelled(pieces), list(range(len(pieces))), language
    )
    expected = [
        Word(word=text.strip(), start=float(at[0]), end=at[-1] + 1.0)
        for text, at in zip(texts, places, strict=True)
        if text.strip()
    ]
    assert words_of(timed(pieces), spaced=language == "english") == expected


def test_a_character_that_is_cut_off_ends_the_last_word() -> None:
    (word,) = words_of(timed([b" caf", b"\xc3"]), spaced=True)
    assert word == Word(word="caf\N{REPLACEMENT CHARACTER}", start=0.0, end=2.0)
    assert words_of([], spaced=True) == []
