"""Words of a transcript, and their times."""

from __future__ import annotations

import codecs
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

UNSPACED: Final = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Codes of languages that write no spaces between words: there each character is one."""
_BEFORE: Final = "\"'\u201c\u00a1\u00bf([{-"
"""Punctuation that belongs to the word after it."""
_BEHIND: Final = "\"'.\u3002,\uff0c!\uff01?\uff1f:\uff1a\u201d)]}\u3001"
"""Punctuation that belongs to the word before it."""


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A word with its punctuation, and its times in seconds."""

    word: str
    start: float
    end: float


class TimedPiece(NamedTuple):
    """What a token adds to a text, in UTF-8, and its times in seconds."""

    data: bytes
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    start: float
    end: float

    def __add__(self, other: _Part) -> _Part:
        return _Part(self.text + other.text, self.start, other.end)


def words_of(pieces: Iterable[TimedPiece], *, spaced: bool) -> list[Word]:
    """Join the tokens of a text to words; `spaced`: its language writes spaces between them.

    Source: the words of OpenAI's program, https://github.com/openai/whisper: `tokenizer.py`, and
    `merge_punctuations` of `timing.py`.
    """
    parts = list(_characters(pieces))
    if spaced:
        parts = _spaced(parts)
    return [
        Word(word=part.text.strip(), start=round(part.start, 2), end=round(part.end, 2))
        for part in _with_punctuation(parts)
        if part.text.strip()
    ]


def _characters(pieces: Iterable[TimedPiece]) -> Iterator[_Part]:
    """The shortest runs of tokens that have whole characters."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text, begun_s, end_s = "", None, 0.0
    for piece in pieces:
        text += decoder.decode(piece.data)
        begun_s, end_s = piece.start if begun_s is None else begun_s, piece.end
        if not decoder.getstate()[0]:
            yield _Part(text, begun_s, end_s)
            text, begun_s = "", None
    if begun_s is not None:
        yield _Part(text + decoder.decode(b"", final=True), begun_s, end_s)


def _spaced(parts: Iterable[_Part]) -> list[_Part]:
    """Words begin with a space, and punctuation stands for itself."""
    words: list[_Part] = []
    for part in parts:
        alone = part.text.startswith(" ") or part.text.strip() in string.punctuation
        if alone or not words:
            words.append(part)
        else:
            words[-1] += part
    return words


def _with_punctuation(parts: Sequence[_Part]) -> list[_Part]:
    following: list[_Part] = []
    for part in reversed(parts):
        if following and part.text.startswith(" ") and part.text.strip() in _BEFORE:
            following[-1] = part + following[-1]
        else:
            following.append(part)
    words: list[_Part] = []
    for part in reversed(following):
        if words and not words[-1].text.endswith(" ") and part.text in _BEHIND:
            words[-1] += part
        else:
            words.append(part)
    return words
