"""Sets of open requests with a digest, and copies of each gateway's set. Pure.

A gateway publishes changes of its set, and each 0.5 s its number and digest, by which a
process that follows it sees that it has missed a change, and requests the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from antiphon.wire.submit import OPEN_DIGEST_BYTES, OpenList, OpenListState, OpenRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.wire.base import Process
    from antiphon.wire.ids import RequestId


OPEN_LIST_READS = (OpenListState.__name__,)
"""What the heartbeats announce of processes that follow open lists."""


class OpenSet:
    """Open requests by id. The digest is that of their ids and attempts, in any order."""

    def __init__(self) -> None:
        self._lines: dict[RequestId, OpenRequest] = {}
        self._sum = 0

    @property
    def requests(self) -> Mapping[RequestId, OpenRequest]:
        return self._lines

    @property
    def digest(self) -> bytes:
        return self._sum.to_bytes(OPEN_DIGEST_BYTES, "little")

    def put(self, line: OpenRequest) -> None:
        self.remove(line.request_id)
        self._lines[line.request_id] = line
        self._sum ^= _digest(line)

    def remove(self, request_id: RequestId) -> None:
        if (line := self._lines.pop(request_id, None)) is not None:
            self._sum ^= _digest(line)

    def clear(self) -> None:
        self._lines.clear()
        self._sum = 0


@dataclass(frozen=True, slots=True)
class OpenChange:
    """What a message has changed in a gateway's set.

    Attributes:
        requests: All of the set, if it is known to be complete.
        torn: The set lacks a change: the whole is to be requested.
    """

    owner: Process
    opened: tuple[OpenRequest, ...] = ()
    closed: tuple[RequestId, ...] = ()
    requests: Mapping[RequestId, OpenRequest] | None = None
    torn: bool = False


@dataclass(slots=True)
class _Followed:
    version: int
    seen_at: float
    complete_at: float | None = None
    open: OpenSet = field(default_factory=OpenSet)


class OpenLists:
    """Follows the sets of all gateways."""

    def __init__(self) -> None:
        self._followed: dict[Process, _Followed] = {}

    def apply(self, message: OpenList | OpenListState, now: float) -> OpenChange | None:
        """Apply a message; None if a later one of the same gateway was applied before."""
        owner = message.owner
        if (followed := self._followed.get(owner)) is None:
            followed = self._followed[owner] = _Followed(-1, now)
        followed.seen_at = now
        if isinstance(message, OpenListState):
            return self._compare(message, now)
        if message.version <= followed.version:
            return None
        followed.version = message.version
        if message.whole:
            followed.open.clear()
        for line in message.opened:
            followed.open.put(line)
        for request_id in message.closed:
            followed.open.remove(request_id)
        complete = message.whole and message.parts == 1
        if complete:
            followed.complete_at = now
        known = followed.open.requests if complete else None
        return OpenChange(owner, message.opened, message.closed, known)

    def _compare(self, state: OpenListState, now: float) -> OpenChange | None:
        followed = self._followed[state.owner]
        if state.version < followed.version:
            return None  # it was overtaken
        known = followed.open.requests
        if len(known) != state.count or followed.open.digest != state.digest:
            return OpenChange(state.owner, torn=True)
        followed.version, followed.complete_at = state.version, now
        return OpenChange(state.owner, requests=known)

    def complete_since(self, owner: Process, since: float) -> bool:
        """Whether a gateway's set was known to be complete after `since`."""
        followed = self._followed.get(owner)
        return (
            followed is not None
            and followed.complete_at is not None
            and followed.complete_at > since
        )

    def find(self, request_id: RequestId) -> tuple[Process, OpenRequest] | None:
        for owner, followed in self._followed.items():
            if (line := followed.open.requests.get(request_id)) is not None:
                return owner, line
        return None

    def forget(self, owner: Process) -> None:
        self._followed.pop(owner, None)

    def forget_silent(self, since: float) -> None:
        """Forget the gateways of which nothing was seen since then."""
        for owner in [owner for owner, each in self._followed.items() if each.seen_at < since]:
            del self._followed[owner]


def _digest(line: OpenRequest) -> int:
    attempt = line.attempt
    followed = "" if attempt is None else f" {attempt.term.number} {attempt.n}"
    content = f"{line.request_id}{followed}".encode()
    return int.from_bytes(blake2b(content, digest_size=OPEN_DIGEST_BYTES).digest(), "little")
