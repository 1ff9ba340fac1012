"""`truncation: auto`: drops the oldest items of a conversation that is too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.openai.responses.items import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    CustomCallOutputItem,
    MessageItem,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from antiphon.gateway.http.openai.responses.items import Item
    from antiphon.wire.errors import PromptTooLong

TRIES_MAX = 6
"""Maximum number of truncations, each of which is tokenized again."""
_KEEP_SHARE = 0.9
"""Safety margin: items are measured in bytes, which only approximate tokens."""


def truncate_items(items: Sequence[Item], error: PromptTooLong) -> list[Item] | None:
    """Drop the oldest items, by as much as the error says the conversation is too long.

    System messages and the last item are kept, with its call if it is an output. Any other output
    is dropped with its call. Returns None if nothing can be dropped.
    """
    sizes = [len(msgspec.json.encode(item)) for item in items]
    excess = sum(sizes) * (1.0 - _share(error) * _KEEP_SHARE)
    answered = {item.call_id for item in _last_outputs(items)}
    gone: set[int] = set()
    for index in range(len(items) - 1):
        if excess <= 0:
            break
        if not _must_keep(items[index], answered):
            gone.add(index)
            excess -= sizes[index]
    if not gone:
        return None
    left = [item for index, item in enumerate(items) if index not in gone]
    called = {item.call_id for item in left if isinstance(item, CallItem | CustomCallItem)}
    return [
        item
        for item in left
        if not isinstance(item, CallOutputItem | CustomCallOutputItem) or item.call_id in called
    ]


def _share(error: PromptTooLong) -> float:
    """Return the share of the conversation that fits, by tokens or by characters."""
    numbers = {name: int(value) for name, value in error.details.items()}
    if "prompt_tokens" in numbers:
        return numbers["tokens_max"] / numbers["prompt_tokens"]
    return numbers["characters_max"] / numbers["characters"]


def _last_outputs(items: Sequence[Item]) -> list[CallOutputItem | CustomCallOutputItem]:
    """Return the outputs at the end, which the model is to answer."""
    found: list[CallOutputItem | CustomCallOutputItem] = []
    for item in reversed(items):
        if not isinstance(item, CallOutputItem | CustomCallOutputItem):
            break
        found.append(item)
    return found


def _must_keep(item: Item, answered: AbstractSet[str]) -> bool:
    if isinstance(item, CallItem | CustomCallItem | CallOutputItem | CustomCallOutputItem):
        return item.call_id in answered
    return isinstance(item, MessageItem) and item.role in ("system", "developer")
