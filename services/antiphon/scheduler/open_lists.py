"""Open requests by gateway, from their open lists; followed by leader and standbys alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.wire.ids import RequestId
from antiphon.wire.submit import OpenRequest

if TYPE_CHECKING:
    from antiphon.wire.base import Process
    from antiphon.wire.submit import OpenList


@dataclass(slots=True)
class GatewayOpenRequests:
    """One gateway's open requests, as of its message `version`."""

    version: int
    received_at: float
    requests: dict[RequestId, OpenRequest] = field(default_factory=dict[RequestId, OpenRequest])


class OpenLists:
    """The open requests of every live gateway."""

    def __init__(self) -> None:
        self._owned: dict[Process, GatewayOpenRequests] = {}

    def apply(self, change: OpenList, now: float) -> bool:
        """Apply a message. Returns False if a later one of the same gateway was applied before.

        A lost message needs no handling: the next full list repairs it.
        """
        owned = self._owned.get(change.owner)
        if owned is None:
            owned = self._owned[change.owner] = GatewayOpenRequests(change.version - 1, now)
        if change.version <= owned.version:
            return False
        owned.version = change.version
        if change.whole:
            owned.received_at = now
            owned.requests = {line.request_id: line for line in change.opened}
        else:
            owned.requests.update((line.request_id, line) for line in change.opened)
        for request_id in change.closed:
            owned.requests.pop(request_id, None)
        return True

    def reported_since(self, owner: Process, since: float) -> bool:
        """Whether a gateway has sent a full list after `since`."""
        owned = self._owned.get(owner)
        return owned is not None and owned.received_at > since

    def find(self, request_id: RequestId) -> tuple[Process, OpenRequest] | None:
        """Return the gateway of an open request and its entry."""
        for owner, owned in self._owned.items():
            line = owned.requests.get(request_id)
            if line is not None:
                return owner, line
        return None

    def forget(self, owner: Process) -> None:
        """Drop the list of a dead gateway."""
        self._owned.pop(owner, None)
