"""What /generate tells: text, ids, and what is known of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.gateway.http.core.logprobs import LOWEST
from antiphon.gateway.http.core.token_origins import CachedTokensDetails, WeightSpan
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from antiphon.gateway.http.native.parse import GenerateResponseOptions
    from antiphon.gateway.owner.actions import Finished
    from antiphon.wire.token_outputs import TokenOutput, TokenOutputsChunk

UNSET = msgspec.UNSET
UnsetType = msgspec.UnsetType

Scored = tuple[float | None, int, str | None]
"""A log-probability, its token, and the token's text where that was asked for."""
States = list[list[float | list[float]]]


class FinishBody(msgspec.Struct, frozen=True, kw_only=True):
    """Why an answer ended.

    Somebody wanted an abort: it has no status. What fails with one is told as an error.
    """

    type: Literal["stop", "length", "abort"]
    matched: str | int | UnsetType | None = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET
    status_code: int | UnsetType | None = UNSET
    err_type: str | UnsetType | None = UNSET


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer beside what it says.

    `reasoning_tokens` is 0, as in SGLang where a request does not require reasoning.

    Attributes:
        weight_version: What the weights are called that drew its last token.
        weight_versions: Which drew which of its tokens, if they were renamed meanwhile.
        num_retractions: How often it lost its place in a worker, and went on later.
        dp_rank: The place of the last worker in the list of /v1/loads, if it is there yet.
        e2e_latency: Seconds from the request to its end; told with the end.
        response_sent_to_client_ts: When that was, in seconds since 1970.
    """

    id: str
    finish_reason: FinishBody | None
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int
    cached_tokens_details: CachedTokensDetails
    weight_version: str
    weight_versions: list[WeightSpan] | UnsetType = UNSET
    num_retractions: int
    dp_rank: int | None
    e2e_latency: float | UnsetType = UNSET
    response_sent_to_client_ts: float | UnsetType = UNSET
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
            return FinishBody(type="abort", message="Aborted", status_code=None, err_type=None)
        case _:
            return FinishBody(type="stop", matched=finished.matched_stop)


def output_ids(piece: TokenOutputsChunk | None) -> list[int]:
    """The ids of an answer; those of its prompt lie before offset 0."""
    if piece is None:
        return []
    ids = unpack_ids(piece.details.token_ids)
    return [token for token in ids[max(0, -piece.offset) :] if token >= 0]


def scores(
    piece: TokenOutputsChunk,
    reply_options: GenerateResponseOptions,
    prompt_ids: Sequence[int],
    *,
    texts: Mapping[int, str],
    first_text: str | None,
    begins: bool,
) -> dict[str, Sequence[object]]:
    """What the fields of `MetaInfo` that tell of log-probabilities get from a piece.

    Args:
        piece: More of an answer, perhaps of its prompt.
        reply_options: What is told of it.
        prompt_ids: Of the prompt.
        texts: Of tokens, as far as they are known.
        first_text: Of the prompt's first token, where texts are told: nothing else tells of it.
        begins: Whether it is the first piece.
    """
    first = reply_options.start - len(prompt_ids)
    entries = list(enumerate(piece.details.iter_tokens(), piece.offset))
    told = _scores((token for offset, token in entries if offset >= 0), texts, reply_options)
    columns = _columns("output", told, reply_options)
    if reply_options.start < 0 or (piece.offset >= 0 and not begins):
        return columns
    read = _scores(
        (token for offset, token in entries if first <= offset < 0), texts, reply_options
    )
    if begins and reply_options.start == 0:  # the first token of a prompt follows nothing
        read.tokens.insert(0, (None, prompt_ids[0], first_text))
        read.tops.insert(0, None)
        read.named.insert(0, None)
    return columns | _columns("input", read, reply_options)


def _columns(
    side: str, scored: Scores, reply_options: GenerateResponseOptions
) -> dict[str, Sequence[object]]:
    columns: dict[str, Sequence[object]] = {f"{side}_token_logprobs": scored.tokens}
    if reply_options.top:
        columns[f"{side}_top_logprobs"] = scored.tops
    if reply_options.named_ids:
        columns[f"{side}_token_ids_logprobs"] = scored.named
    return columns


def _scores(
    tokens: Iterable[TokenOutput], texts: Mapping[int, str], reply_options: GenerateResponseOptions
) -> Scores:
    scored = Scores(tokens=[], tops=[], named=[])
    for token in tokens:
        if token.token_id >= 0:
            scored.tokens.append(_scored(token.logprob, token.token_id, texts))
        tops = [_scored(logprob, each, texts) for each, logprob in token.top if each >= 0]
        scored.tops.append(tops)
        named = zip(token.named, reply_options.named_ids, strict=False)
        scored.named.append([_scored(logprob, each, texts) for logprob, each in named])
    return scored


def _scored(logprob: float | None, token_id: int, texts: Mapping[int, str]) -> Scored:
    value = None if logprob is None else max(logprob, LOWEST)
    return value, token_id, texts.get(token_id)
