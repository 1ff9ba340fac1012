"""Incremental decoding of token ids to text, never emitting a partial character.

Ids are decoded one by one regardless of their batches, so the text is a pure function of the ids: a
detokenizer that starts over from offset 0 produces the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

Decode = Callable[[Sequence[int], bool], str]
"""(ids, skip special tokens) -> text."""

HELD_TOKENS_MAX = 8
"""Maximum number of tokens decoded together, besides the context: a text may continue without end
and without a token that completes its character."""

BROKEN_MAX = 3
"""Maximum number of bytes of an incomplete UTF-8 character: so many U+FFFD at the end of a text may
still become something else. Those before them are final."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


TEXTS_MAX = 65_536
"""Maximum number of tokens whose text is cached."""


class IncrementalDecoder:
    """Turns the ids of one choice into text; the pieces add up to the text of all ids at once.

    A token's text depends on its neighbours: SentencePiece drops the first space, byte tokens are
    parts of characters. So the ids since the last clean cut are decoded together with the ones
    just before it, and the difference is the new text. Skipped special tokens do not serve as
    context: the word after them would lose its space as if it were the first.

    Two differences remain. A U+FFFD that the model itself writes in bytes looks like an incomplete
    character: the bytes after it may be decoded as U+FFFD, too. And where byte tokens form no valid
    text, SentencePiece decodes every byte of their whole run as U+FFFD; here complete characters of
    the run have been emitted already and stay.
    """

    def __init__(self, decode: Decode, skip_special_tokens: bool) -> None:
        self._decode = decode
        self._skip = skip_special_tokens
        self._context: list[int] = []  # ids whose text has been emitted
        self._held: list[int] = []  # ids whose text may still end with a partial character
        self._shown = ""  # the emitted part of the text of both

    @property
    def has_pending(self) -> bool:
        return bool(self._held)

    def push(self, token_id: int) -> str:
        """Decode the next id; return the text that is final now, perhaps empty."""
        self._held.append(token_id)
        text = self._text([*self._context, *self._held])
        if not text.endswith(REPLACEMENT):
            return self._release(text)
        new = self._advance(text)
        if len(self._held) >= HELD_TOKENS_MAX:
            self._forget()
        return new

    def flush(self) -> str:
        """Return the remaining text at the end; a partial character becomes U+FFFD."""
        if not self._held:
            return ""
        return self._release(self._text([*self._context, *self._held]))

    def _release(self, text: str) -> str:
        """Emit the text of all held ids, and keep them as context if they can be one."""
        if not text.startswith(self._shown):
            # Bytes that broke the context's run are decoded by themselves.
            text, self._shown = self._text(self._held), ""
        new = text[len(self._shown) :]
        if self._writes(self._held):
            self._context = self._held
        self._held = []
        self._shown = self._text(self._context)
        return new

    def _advance(self, text: str) -> str:
        """Emit the final part of a text that ends with U+FFFD."""
        if not text.startswith(self._shown):
            # SentencePiece decodes no byte of a run before all of it is valid.
            if len(self._held) <= BROKEN_MAX:
                return ""
            self._context, self._shown = [], ""
            text = self._text(self._held)
        certain = _certain(text)
        new = certain[len(self._shown) :]
        self._shown = max(self._shown, certain, key=len)
        return new

    def _forget(self) -> None:
        """Keep the fewest of the last ids that still determine a partial character."""
        waiting = len(self._text([*self._context, *self._held])) - len(self._shown)
        texts = [(start, self._text(self._held[start:])) for start in range(1, len(self._held))]
        for whole in (True, False):
            for start, text in reversed(texts):
                shown = text[: len(text) - waiting]
                # Best is a complete character before the partial one. Where each token ends inside
                # a character, these begin inside of one, too: then keep so many bytes that the
                # partial character is among them from its first byte on.
                if shown and REPLACEMENT not in shown if whole else len(text) > BROKEN_MAX:
                    self._context, self._held, self._shown = [], self._held[start:], shown
                    return
        # A partial character, and special tokens that are skipped.
        self._held = [token for token in self._held if self._writes([token])]

    def _writes(self, ids: Sequence[int]) -> bool:
        """Whether ids add to a text. A lone space does, after other tokens."""
        return bool(self._text(ids) or self._text([*ids, *ids]))

    def _text(self, ids: Sequence[int]) -> str:
        return self._decode(ids, self._skip)


def _certain(text: str) -> str:
    """The text without the U+FFFD at its end that may become something else."""
    broken = len(text) - len(text.rstrip(REPLACEMENT))
    return text[: len(text) - min(broken, BROKEN_MAX)]


class TokenTexts:
    """The text of each token by itself, and its bytes where they differ from that text.

    By itself a part of a character is U+FFFD, and SentencePiece drops the space before a word; but
    the bytes of consecutive tokens add up to the text. `tokens` has the bytes of each token by id,
    where the tokenizer defines them; empty for special tokens.
    """

    def __init__(self, decode: Decode, tokens: Sequence[bytes] = ()) -> None:
        self._decode = decode
        self._tokens = tokens
        self._text = lru_cache(TEXTS_MAX)(self._decode_one)

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
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
