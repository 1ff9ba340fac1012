"""Logprobs in OpenAI's formats for chat and text completions."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.wire.token_outputs import TokenOutput, TokenOutputsChunk

LOWEST = -9999.0
"""Replaces minus infinity, which JSON lacks; OpenAI's API uses it too."""


TopLogprobs = Annotated[int, Meta(ge=0, le=20)]


class TopLogprob(msgspec.Struct, frozen=True):
    """A likely token. `bytes` is its text, possibly part of a character.

    Null for a special token, which is not in the text.
    """

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob, frozen=True):
    """The token and the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of the tokens of a message, or of a chunk."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of a text, as columns. `text_offset` counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


def chat_logprobs(piece: TokenOutputsChunk | None) -> ChatLogprobs | None:
    if piece is None:
        return None
    content = [
        TokenLogprob(
            token=piece.text_of(detail.token_id),
            logprob=_logprob(detail.logprob),
            bytes=_bytes(piece, detail.token_id),
            top_logprobs=[
                TopLogprob(
                    token=piece.text_of(other),
                    logprob=_logprob(logprob),
                    bytes=_bytes(piece, other),
                )
                for other, logprob in detail.top
                if other >= 0
            ],
        )
        for detail in piece.details.iter_tokens()
        if detail.token_id >= 0
    ]
    return ChatLogprobs(content)


def token_logprobs(piece: TokenOutputsChunk | None) -> list[TopLogprob]:
    """The logprobs of all tokens, without those of others at their positions."""
    if piece is None:
        return []
    return [
        TopLogprob(
            token=piece.text_of(detail.token_id),
            logprob=_logprob(detail.logprob),
            bytes=_bytes(piece, detail.token_id),
        )
        for detail in piece.details.iter_tokens()
    ]


def text_logprobs(
    piece: TokenOutputsChunk | None, start: int, before: tuple[str, ...] = ()
) -> TextLogprobs | None:
    """Convert token outputs to the format of text completions; None without them.

    `start` is the number of characters before them; `before` are texts of tokens without outputs
    that come first, such as the first prompt token.
    """
    if piece is None and not before:
        return None
    tokens = [] if piece is None else list(_tokens(piece))
    texts = [*before, *(text for text, _, _ in tokens)]
    tops = [_by_text(top) for _, _, top in tokens]
    offsets = list(accumulate(map(len, texts), initial=start))[: len(texts)]
    unknown = [None] * len(before)
    return TextLogprobs(
        tokens=texts,
        token_logprobs=[*unknown, *(_logprob(detail.logprob) for _, detail, _ in tokens)],
        top_logprobs=[*unknown, *tops] if any(tops) else None,
        text_offset=offsets,
    )


def _by_text(top: list[tuple[str, float]]) -> dict[str, float]:
    """Logprobs by token text, most likely first; the highest one of tokens with equal text."""
    logprobs: dict[str, float] = {}
    for text, logprob in top:
        logprobs.setdefault(text, _logprob(logprob))
    return logprobs


def _tokens(piece: TokenOutputsChunk) -> Iterator[tuple[str, TokenOutput, list[tuple[str, float]]]]:
    for detail in piece.details.iter_tokens():
        if detail.token_id < 0:  # next-token outputs of a prompt without generated tokens
            continue
        top = [(piece.text_of(token), logprob) for token, logprob in detail.top if token >= 0]
        yield piece.text_of(detail.token_id), detail, top


def _bytes(piece: TokenOutputsChunk, token_id: int) -> list[int] | None:
    return list(piece.bytes_of(token_id)) or None


def _logprob(value: float | None) -> float:
    return LOWEST if value is None else max(value, LOWEST)
