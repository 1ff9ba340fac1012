"""Logit processors: what a request may ask for by name beside its sampling parameters.

A processor decides which tokens may come next, from its parameters and the tokens so far. There is
a struct here for each, whose tag is its name; no request ever brings code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from antiphon.wire.base import Value

if TYPE_CHECKING:
    from collections.abc import Mapping

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenSet = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=4096)]


class DisallowTokens(Value, tag="disallow_tokens"):
    """None of these tokens is drawn."""

    token_ids: TokenSet


class AllowTokens(Value, tag="allow_tokens"):
    """Only these tokens are drawn. One that ends the answer must be among them to be drawn."""

    token_ids: TokenSet


class AllowRange(Value, tag="allow_range"):
    """Only tokens from `first` to `last`, both included, are drawn."""

    first: TokenId
    last: TokenId


class ThinkingBudget(Value, tag="thinking_budget"):
    """Ends a model's thinking after so many tokens, by drawing `closing_ids` one after the other.

    Thinking goes on from a `begin_id`, in the prompt or in the answer, to the last of the closing
    ids. Its tokens count from the later of `begin_id` and the beginning of the answer.
    """

    tokens_max: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    begin_id: TokenId
    closing_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=64)]


LogitProcessor = DisallowTokens | AllowTokens | AllowRange | ThinkingBudget
REGISTERED: Mapping[str, type[LogitProcessor]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (DisallowTokens, AllowTokens, AllowRange, ThinkingBudget)
}
"""By their names, for those who ask by name."""
LogitProcessors = Annotated[tuple[LogitProcessor, ...], Meta(max_length=8)]


def named_ids(processor: LogitProcessor) -> tuple[int, ...]:
    """The tokens that must be in a model's vocabulary for a processor to make sense."""
    match processor:
        case DisallowTokens(token_ids=ids) | AllowTokens(token_ids=ids):
            return ids
        case AllowRange(first=first):
            return (first,)
        case ThinkingBudget(begin_id=begin_id, closing_ids=closing_ids):
            return (begin_id, *closing_ids)
