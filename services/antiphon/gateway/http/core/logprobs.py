"""Log-probabilities as OpenAI clients read them: of a chat, and of a text completion."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.wire.token_outputs import TokenOutput, TokenOutputsChunk

LOWEST = -9999.0
"""In place of minus infinity, which JSON does not have: as OpenAI writes what is unlikely."""

NOTHING_BEFORE: tuple[str, ...] = ()


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that might have come; `bytes` is what it writes, perhaps a part of a character.

    None of a special token, which the text leaves out.
    """

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token that came, and the likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of the tokens of a message, or of a piece of one."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """Of the tokens of a text: columns. `text_offset` counts characters of the tokens' texts."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


def chat_logprobs(piece: TokenOutputsChunk | None) -> ChatLogprobs | None:
    """Write details as a chat has them; None without."""
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


def text_logprobs(
    piece: TokenOutputsChunk | None, start: int, before: tuple[str, ...] = NOTHING_BEFORE
) -> TextLogprobs | None:
    """Write details as a text completion has them; None without.

    Args:
        piece: Of consecutive tokens.
        start: How many characters the tokens before had.
        before: Texts of tokens that nothing is known of, as the first of a prompt: they come first.
    """
    if piece is None and not before:
        return None
    tokens = [] if piece is None else list(_tokens(piece))
    texts = [*before, *(text for text, _, _ in tokens)]
    tops = [_by_text(likeliest) for _, _, likeliest in tokens]
    offsets = list(accumulate(map(len, texts), initial=start))[: len(texts)]
    unknown = [None] * len(before)
    return TextLogprobs(
        tokens=texts,
        token_logprobs=[*unknown, *(_logprob(detail.logprob) for _, detail, _ in tokens)],
        top_logprobs=[*unknown, *tops] if any(tops) else None,
        text_offset=offsets,
    )


def _by_text(likeliest: list[tuple[str, float]]) -> dict[str, float]:
    """The likeliest first, as clients read them; of tokens with one text, the likelier."""
    told: dict[str, float] = {}
    for text, logprob in likeliest:
        told.setdefault(text, _logprob(logprob))
    return told


def _tokens(piece: TokenOutputsChunk) -> Iterator[tuple[str, TokenOutput, list[tuple[str, float]]]]:
    for detail in piece.details.iter_tokens():
        if detail.token_id < 0:  # what would follow a prompt after which nothing is drawn
            continue
        likeliest = [(piece.text_of(token), logprob) for token, logprob in detail.top if token >= 0]
        yield piece.text_of(detail.token_id), detail, likeliest


def _bytes(piece: TokenOutputsChunk, token_id: int) -> list[int] | None:
    return list(piece.bytes_of(token_id)) or None


def _logprob(value: float | None) -> float:
    return LOWEST if value is None else max(value, LOWEST)
