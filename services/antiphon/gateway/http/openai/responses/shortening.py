"""`truncation: auto`: the oldest items of a conversation that is too long are left out."""

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

    from antiphon.gateway.http.openai.responses.items import Item
    from antiphon.wire.errors import PromptTooLong

TRIES_MAX = 6
"""How often a conversation is shortened: each time it is encoded again."""
_KEEP_SHARE = 0.9
"""Items are measured in bytes, which are tokens only about."""


def shortened(items: Sequence[Item], error: PromptTooLong) -> list[Item] | None:
    """Leave out the oldest items, by as much as the error says that there is too much.

    System messages stay, and the last item; an output goes with its call. None: nothing is left
    that may go.
    """
    share = int(error.details["tokens_max"]) / int(error.details["prompt_tokens"]) * _KEEP_SHARE
    sizes = [len(msgspec.json.encode(item)) for item in items]
    excess = sum(sizes) * (1.0 - share)
    gone: set[int] = set()
    for index in range(len(items) - 1):
        if excess <= 0:
            break
        if not _stays(items[index]):
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


def _stays(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")
