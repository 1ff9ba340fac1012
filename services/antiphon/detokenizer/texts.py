"""Single tokens, as whoever wants log-probabilities is told of them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from antiphon.detokenizer.incremental import Decode

TEXTS_MAX = 65_536
"""Tokens whose text is remembered."""


class TokenTexts:
    """The text of each token by itself, and what it writes where that is something else.

    By itself a part of a character is U+FFFD, and SentencePiece drops the space before a word; but
    what tokens write, one after the other, is the text.
    """

    def __init__(self, decode: Decode, tokens: Sequence[bytes] = ()) -> None:
        """Nothing is remembered yet.

        Args:
            decode: Of the tokenizer.
            tokens: What each writes, by id, as far as the tokenizer says so; empty for special
                ones.
        """
        self._decode = decode
        self._tokens = tokens
        self._text = lru_cache(TEXTS_MAX)(self._decode_one)

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """The text of each, special tokens included."""
        return {token: self._text(token) for token in ids}

    def token_bytes(self, ids: Iterable[int], *, skips_special: bool) -> dict[int, bytes]:
        """The bytes of those that write something else than their text by itself."""
        told: dict[int, bytes] = {}
        for token in ids:
            written = self._tokens[token] if token < len(self._tokens) else b""
            text = self._text(token).encode()
            if written != text and (written or (skips_special and token < len(self._tokens))):
                told[token] = written
        return told

    def _decode_one(self, token: int) -> str:
        skip_special_tokens = False
        return self._decode([token], skip_special_tokens)
