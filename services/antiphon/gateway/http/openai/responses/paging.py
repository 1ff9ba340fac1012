"""Paging of the input items of a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.openai.responses.replies import ItemList
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from antiphon.gateway.http.openai.responses.items import Item

QUERY = {
    "limit": "Number of items to return, 1 to 100. Defaults to 20.",
    "order": "`desc` (default) for the newest items first, or `asc`.",
    "after": "Id of an item after which the page starts.",
}
_LIMIT = 20
_LIMIT_MAX = 100


def page_of(items: Sequence[Item], query: Mapping[str, str]) -> ItemList:
    """Return the requested page.

    Args:
        items: All items, oldest first.
        query: The query parameters.

    Raises:
        InvalidRequest: A query parameter is invalid.
    """
    limit, order = _limit(query.get("limit", str(_LIMIT))), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: must be asc or desc", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    ordered = _behind(ordered, query.get("after"))
    page = ordered[:limit]
    return ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(ordered) > limit,
    )


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:4]) <= _LIMIT_MAX:
        raise InvalidRequest(f"limit: must be 1 to {_LIMIT_MAX}", param="limit")
    return int(text)


def _behind(items: list[Item], after: str | None) -> list[Item]:
    if after is None:
        return items
    for index, item in enumerate(items):
        if item.id == after:
            return items[index + 1 :]
    raise InvalidRequest(f"after: unknown item '{after}'", param="after")
