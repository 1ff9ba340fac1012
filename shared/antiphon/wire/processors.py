"""Logits processors, which a request selects by name beside its sampling parameters.

A processor masks tokens, depending on its parameters and the tokens so far. Each is a struct whose
tag is its name; requests never carry code.
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
    """Never sample these tokens."""

    token_ids: TokenSet


class AllowTokens(Value, tag="allow_tokens"):
    """Sample only these tokens. End-of-sequence tokens must be listed, too, to be sampled."""

    token_ids: TokenSet


class AllowRange(Value, tag="allow_range"):
    """Sample only token ids from `first` to `last`, both included."""

    first: TokenId
    last: TokenId


class ThinkingBudget(Value, tag="thinking_budget"):
    """Ends reasoning after `tokens_max` tokens, by forcing `closing_ids` one after the other.

    Reasoning lasts from a `begin_id`, in the prompt or the output, to the last closing id. Its
    tokens count from the later of `begin_id` and the start of the output.
    """

    tokens_max: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    begin_id: TokenId
    closing_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=64)]


LogitProcessor = DisallowTokens | AllowTokens | AllowRange | ThinkingBudget
REGISTERED: Mapping[str, type[LogitProcessor]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (DisallowTokens, AllowTokens, AllowRange, ThinkingBudget)
}
"""Processors by name."""
LogitProcessors = Annotated[tuple[LogitProcessor, ...], Meta(max_length=8)]


def named_ids(processor: LogitProcessor) -> tuple[int, ...]:
    """Token ids that must be in the model's vocabulary for the processor to be valid."""
    match processor:
        case DisallowTokens(token_ids=ids) | AllowTokens(token_ids=ids):
            return ids
        case AllowRange(first=first):
            return (first,)
        case ThinkingBudget(begin_id=begin_id, closing_ids=closing_ids):
            return (begin_id, *closing_ids)
