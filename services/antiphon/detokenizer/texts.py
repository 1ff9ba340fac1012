"""Texts and bytes of single tokens, for logprobs."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from antiphon.detokenizer.incremental import Decode

TEXTS_MAX = 65_536
"""Maximum number of tokens whose text is cached."""


class TokenTexts:
    """The text of each token by itself, and its bytes where they differ from that text.

    By itself a part of a character is U+FFFD, and SentencePiece drops the space before a word; but
    the bytes of consecutive tokens add up to the text.
    """

    def __init__(self, decode: Decode, tokens: Sequence[bytes] = ()) -> None:
        """Start with an empty cache.

        Args:
            decode: The tokenizer's decode function.
            tokens: The bytes of each token by id, where the tokenizer defines them; empty for
                special tokens.
        """
        self._decode = decode
        self._tokens = tokens
        self._text = lru_cache(TEXTS_MAX)(self._decode_one)

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """The text of each token, special tokens included."""
        return {token: self._text(token) for token in ids}

    def token_bytes(self, ids: Iterable[int], *, skips_special: bool) -> dict[int, bytes]:
        """The bytes of those tokens whose bytes differ from their text by itself."""
        differing: dict[int, bytes] = {}
        for token in ids:
            written = self._tokens[token] if token < len(self._tokens) else b""
            text = self._text(token).encode()
            if written != text and (written or (skips_special and token < len(self._tokens))):
                differing[token] = written
        return differing

    def _decode_one(self, token: int) -> str:
        skip_special_tokens = False
        return self._decode([token], skip_special_tokens)
