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
    from collections.abc import Set as AbstractSet

    from antiphon.gateway.http.openai.responses.items import Item
    from antiphon.wire.errors import PromptTooLong

TRIES_MAX = 6
"""How often a conversation is shortened: each time it is encoded again."""
_KEEP_SHARE = 0.9
"""Items are measured in bytes, which are tokens only about."""


def truncate_items(items: Sequence[Item], error: PromptTooLong) -> list[Item] | None:
    """Leave out the oldest items, by as much as the error says that there is too much.

    System messages stay, and the last item, with its call if it is an output; any other output goes
    with its call. None: nothing is left that may go.
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
    """The part of the conversation that fits, by its tokens or by its characters."""
    numbers = {name: int(value) for name, value in error.details.items()}
    if "prompt_tokens" in numbers:
        return numbers["tokens_max"] / numbers["prompt_tokens"]
    return numbers["characters_max"] / numbers["characters"]


def _last_outputs(items: Sequence[Item]) -> list[CallOutputItem | CustomCallOutputItem]:
    """The outputs at the end: what the model is to answer."""
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
