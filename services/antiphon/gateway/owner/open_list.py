"""The open list: requests of this gateway, in full or as changes, with a version each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.wire.submit import OpenList

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.gateway.owner.request import OwnedRequest
    from antiphon.service.clock import Clock
    from antiphon.wire.base import Process
    from antiphon.wire.ids import ModelName, RequestId
    from antiphon.wire.submit import OpenRequest

_LISTS_VALID = 3  # A list this many intervals old is no longer valid


class OpenListBuilder:
    """Collects changes until they are published. Pure.

    The entries are kept between full lists: by then the requests themselves have left the CPU
    cache.
    """

    def __init__(self, owner: Process, model: ModelName, clock: Clock, interval_s: float) -> None:
        self._owner = owner
        self._model = model
        self._clock = clock
        self._valid_ms = int(_LISTS_VALID * interval_s * 1000)
        self._version = 0
        self._open: dict[RequestId, OpenRequest] = {}
        self._changed: dict[RequestId, OpenRequest] = {}
        self._closed: list[RequestId] = []

    def add(self, request: OwnedRequest) -> None:
        """Add a request that is new, or that follows another attempt."""
        self._open[request.id] = self._changed[request.id] = request.open_list_entry()

    def close(self, request: OwnedRequest) -> None:
        del self._open[request.id]
        self._changed.pop(request.id, None)
        self._closed.append(request.id)

    def changes(self) -> OpenList | None:
        if not self._changed and not self._closed:
            return None
        return self._list(self._changed.values(), tuple(self._closed), whole=False)

    def whole(self) -> OpenList:
        """Return all open requests; includes all changes so far."""
        return self._list(self._open.values(), (), whole=True)

    def _list(
        self, opened: Iterable[OpenRequest], closed: tuple[RequestId, ...], *, whole: bool
    ) -> OpenList:
        self._version += 1
        message = OpenList(
            model=self._model,
            owner=self._owner,
            version=self._version,
            whole=whole,
            opened=tuple(opened),
            closed=closed,
            not_after_unix_ms=self._clock.unix_ms() + self._valid_ms,
        )
        self._changed.clear()
        self._closed.clear()
        return message
