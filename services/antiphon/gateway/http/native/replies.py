"""What /generate tells: text, ids, and what is known of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.gateway.http.openai.logprobs import LOWEST
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from antiphon.gateway.http.native.reading import Telling
    from antiphon.gateway.owner.actions import Finished
    from antiphon.wire.details import DetailPiece, TokenDetail

UNSET = msgspec.UNSET
UnsetType = msgspec.UnsetType

Scored = tuple[float | None, int, str | None]
"""A log-probability, its token, and the token's text where that was asked for."""
States = list[list[float | list[float]]]


class FinishBody(msgspec.Struct, frozen=True, kw_only=True):
    """Why an answer ended."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | UnsetType | None = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer beside what it says.

    `reasoning_tokens` is 0, as in SGLang where a request does not require reasoning.
    """

    id: str
    finish_reason: FinishBody | None
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int
    weight_version: str
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[Scored] | UnsetType = UNSET
    output_token_logprobs: list[Scored] | UnsetType = UNSET
    input_top_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    hidden_states: States | UnsetType = UNSET


class GenerateReply(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or what is known of it so far. `index` numbers the answers of a batch."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: list[int] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The columns of one stretch of tokens."""

    tokens: list[Scored]
    tops: list[list[Scored] | None]
    named: list[list[Scored] | None]


def finish_body(finished: Finished | None, tokens: int) -> FinishBody | None:
    """Write how an answer ended, after so many tokens."""
    if finished is None:
        return None
    match finished.reason:
        case FinishReason.LENGTH:
            return FinishBody(type="length", length=tokens)
        case FinishReason.ABORT:
            return FinishBody(type="abort", message="Aborted")
        case _:
            return FinishBody(type="stop", matched=finished.matched_stop)


def output_ids(piece: DetailPiece | None) -> list[int]:
    """The ids of an answer; those of its prompt lie before offset 0."""
    if piece is None:
        return []
    ids = unpack_ids(piece.details.token_ids)
    return [token for token in ids[max(0, -piece.offset) :] if token >= 0]


def scores(piece: DetailPiece, telling: Telling, prompt_ids: Sequence[int]) -> dict[str, object]:
    """The fields of `MetaInfo` that tell of log-probabilities."""
    first = telling.start - len(prompt_ids)
    entries = list(enumerate(piece.details.each(), piece.offset))
    prompt = [token for offset, token in entries if telling.start >= 0 and first <= offset < 0]
    told = _scores((token for offset, token in entries if offset >= 0), piece, telling)
    columns: dict[str, object] = {
        "output_token_logprobs": told.tokens,
        "output_token_logprobs_length": len(told.tokens),
    }
    if telling.top:
        columns["output_top_logprobs"] = told.tops
    if telling.named_ids:
        columns["output_token_ids_logprobs"] = told.named
    if telling.start < 0 or piece.offset >= 0:
        return columns
    read = _scores(prompt, piece, telling)
    # The first token of a prompt follows nothing.
    start = [(None, prompt_ids[0], None)] if telling.start == 0 else []
    columns["input_token_logprobs"] = [*start, *read.tokens]
    if telling.top:
        columns["input_top_logprobs"] = [*[None] * len(start), *read.tops]
    if telling.named_ids:
        columns["input_token_ids_logprobs"] = [*[None] * len(start), *read.named]
    return columns


def _scores(tokens: Iterable[TokenDetail], piece: DetailPiece, telling: Telling) -> Scores:
    texts = {token: piece.text_of(token) for token in piece.texts}
    scored = Scores(tokens=[], tops=[], named=[])
    for token in tokens:
        if token.token_id >= 0:
            scored.tokens.append(_scored(token.logprob, token.token_id, texts))
        tops = [_scored(logprob, each, texts) for each, logprob in token.top if each >= 0]
        scored.tops.append(tops)
        named = zip(token.named, telling.named_ids, strict=False)
        scored.named.append([_scored(logprob, each, texts) for logprob, each in named])
    return scored


def _scored(logprob: float | None, token_id: int, texts: dict[int, str]) -> Scored:
    value = None if logprob is None else max(logprob, LOWEST)
    return value, token_id, texts.get(token_id)


def states(piece: DetailPiece, hidden: str) -> States:
    """Hidden states: the rows of the prompt as one entry, then one each token; or the last."""
    rows = [list(token.hidden) for token in piece.details.each()]
    if hidden == "last" or piece.offset >= 0:
        return [_entry(row) for row in rows]
    # The first token of the answer follows the prompt's last.
    read, drawn = rows[: 1 - piece.offset], rows[1 - piece.offset :]
    return [_entry(read), *map(_entry, drawn)]


def _entry(row: Sequence[float | list[float]]) -> list[float | list[float]]:
    return list(row)
