"""Lists of requests that other processes follow by their changes. Pure.

A process publishes the changes of its list, numbered, and each 0.5 s the number of lines and their
digest. A process whose copy differs has missed a change, and requests the whole list. Gateways
publish their open requests, and workers the requests that they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from antiphon.wire.bounds import LIST_DIGEST_BYTES
from antiphon.wire.heartbeat import RunningList, RunningRequest
from antiphon.wire.submit import OpenList, OpenListState, OpenRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from antiphon.wire.base import Process
    from antiphon.wire.ids import RequestId


OPEN_LIST_READS = (OpenListState.__name__,)
"""What the heartbeats announce of processes that follow open lists."""
RUNNING_LIST_READS = (RunningList.__name__,)
"""The same of those that read the heartbeats of workers."""
WHOLE_LIST_PAUSE_S = 0.1
"""Least pause between two whole lists, however many processes request them."""


class Line(Protocol):
    @property
    def request_id(self) -> RequestId: ...


L = TypeVar("L", bound=Line)
L_co = TypeVar("L_co", bound=Line, covariant=True)


class ListMessage(Protocol[L_co]):
    """A message with changes: `opened` are new lines or replace earlier ones."""

    @property
    def version(self) -> int: ...
    @property
    def whole(self) -> bool: ...
    @property
    def opened(self) -> tuple[L_co, ...]: ...
    @property
    def closed(self) -> tuple[RequestId, ...]: ...
    @property
    def parts(self) -> int: ...


class ListState(Protocol):
    @property
    def version(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def digest(self) -> bytes: ...


class LineSet(Generic[L]):
    """Lines by request id. The digest is the XOR of those of their contents, in any order."""

    def __init__(self, content: Callable[[L], str]) -> None:
        self._content = content
        self._lines: dict[RequestId, L] = {}
        self._sum = 0

    @property
    def lines(self) -> Mapping[RequestId, L]:
        return self._lines

    @property
    def digest(self) -> bytes:
        return self._sum.to_bytes(LIST_DIGEST_BYTES, "little")

    def put(self, line: L) -> None:
        self.remove(line.request_id)
        self._lines[line.request_id] = line
        self._sum ^= self._digest(line)

    def remove(self, request_id: RequestId) -> None:
        if (line := self._lines.pop(request_id, None)) is not None:
            self._sum ^= self._digest(line)

    def clear(self) -> None:
        self._lines.clear()
        self._sum = 0

    def _digest(self, line: L) -> int:
        content = self._content(line).encode()
        return int.from_bytes(blake2b(content, digest_size=LIST_DIGEST_BYTES).digest(), "little")


# The side that publishes.


@dataclass(frozen=True, slots=True)
class ListUpdate(Generic[L]):
    """The content of a `ListMessage`."""

    version: int
    whole: bool
    opened: tuple[L, ...]
    closed: tuple[RequestId, ...]
    parts: int


class PublishedList(Generic[L]):
    """A list of this process: collects its changes until they are published.

    `part_max` lines go into a message.
    """

    def __init__(self, content: Callable[[L], str], part_max: int) -> None:
        self.version = 0
        self._set = LineSet(content)
        self._part_max = part_max
        self._changed: dict[RequestId, L | None] = {}
        self._whole_at: float | None = None

    @property
    def lines(self) -> Mapping[RequestId, L]:
        return self._set.lines

    @property
    def digest(self) -> bytes:
        return self._set.digest

    @property
    def is_published(self) -> bool:
        return not self._changed

    def put(self, line: L) -> None:
        """Add a line, or replace that of its request. An equal one is no change."""
        if self._set.lines.get(line.request_id) != line:
            self._set.put(line)
            self._changed[line.request_id] = line

    def remove(self, request_id: RequestId) -> None:
        self._set.remove(request_id)
        self._changed[request_id] = None

    def changes(self) -> Iterator[ListUpdate[L]]:
        """Take the changes since the last call."""
        changed, self._changed = list(self._changed.items()), {}
        for start in range(0, len(changed), self._part_max):
            part = changed[start : start + self._part_max]
            opened = tuple(line for _, line in part if line is not None)
            closed = tuple(request_id for request_id, line in part if line is None)
            yield self._update(opened, closed)

    def whole(self) -> ListUpdate[L]:
        """Return all lines in one message; includes all changes so far."""
        return self._update(tuple(self.lines.values()), whole=True)

    def parts(self, now: float) -> Iterator[ListUpdate[L]]:
        """Yield all lines in messages of bounded size; none if all were sent just before.

        A process that requests them so soon will request them once more.
        """
        if self._whole_at is not None and now - self._whole_at < WHOLE_LIST_PAUSE_S:
            return
        self._whole_at = now
        lines = tuple(self.lines.values())
        starts = range(0, max(1, len(lines)), self._part_max)
        for start in starts:
            part = lines[start : start + self._part_max]
            yield self._update(part, whole=start == 0, parts=len(starts))

    def _update(
        self,
        opened: tuple[L, ...],
        closed: tuple[RequestId, ...] = (),
        *,
        whole: bool = False,
        parts: int = 1,
    ) -> ListUpdate[L]:
        self.version += 1
        if whole:
            self._changed = {}
        return ListUpdate(self.version, whole, opened, closed, parts)


# The side that follows.


@dataclass(frozen=True, slots=True)
class ListChange(Generic[L]):
    """What a message has changed in the copy of a process's list.

    Attributes:
        lines: All of the list, if the copy is known to be complete.
        torn: The copy lacks a change: the whole list is to be requested.
    """

    source: Process
    opened: tuple[L, ...] = ()
    closed: tuple[RequestId, ...] = ()
    lines: Mapping[RequestId, L] | None = None
    torn: bool = False


@dataclass(slots=True)
class _Copy(Generic[L]):
    set: LineSet[L]
    seen_at: float
    version: int = -1
    complete_at: float | None = None


class FollowedLists(Generic[L]):
    """Copies of the lists of other processes."""

    def __init__(self, content: Callable[[L], str]) -> None:
        self._content = content
        self._copies: dict[Process, _Copy[L]] = {}

    def update(self, source: Process, message: ListMessage[L], now: float) -> ListChange[L] | None:
        """Apply changes; None if later ones of the same process were applied before."""
        copy = self._copy(source, now)
        if message.version <= copy.version:
            return None
        copy.version = message.version
        if message.whole:
            copy.set.clear()
        for line in message.opened:
            copy.set.put(line)
        for request_id in message.closed:
            copy.set.remove(request_id)
        complete = message.whole and message.parts == 1
        if complete:
            copy.complete_at = now
        lines = copy.set.lines if complete else None
        return ListChange(source, message.opened, message.closed, lines)

    def compare(self, source: Process, state: ListState, now: float) -> ListChange[L] | None:
        """Compare a copy with what its process says of the list; None if that was overtaken."""
        copy = self._copy(source, now)
        if state.version < copy.version:
            return None
        if len(copy.set.lines) != state.count or copy.set.digest != state.digest:
            return ListChange(source, torn=True)
        copy.version, copy.complete_at = state.version, now
        return ListChange(source, lines=copy.set.lines)

    def complete_since(self, source: Process, since: float) -> bool:
        """Whether the copy of a list was known to be complete after `since`."""
        copy = self._copies.get(source)
        return copy is not None and copy.complete_at is not None and copy.complete_at > since

    def find(self, request_id: RequestId) -> tuple[Process, L] | None:
        for source, copy in self._copies.items():
            if (line := copy.set.lines.get(request_id)) is not None:
                return source, line
        return None

    def forget(self, source: Process) -> None:
        self._copies.pop(source, None)

    def forget_silent(self, since: float) -> None:
        """Forget the processes of which nothing was seen since then."""
        for source in [source for source, copy in self._copies.items() if copy.seen_at < since]:
            del self._copies[source]

    def _copy(self, source: Process, now: float) -> _Copy[L]:
        if (copy := self._copies.get(source)) is None:
            copy = self._copies[source] = _Copy(LineSet(self._content), now)
        copy.seen_at = now
        return copy


class OpenLists(FollowedLists[OpenRequest]):
    """Copies of the open lists of all gateways."""

    def __init__(self) -> None:
        super().__init__(open_content)

    def apply(
        self, message: OpenList | OpenListState, now: float
    ) -> ListChange[OpenRequest] | None:
        if isinstance(message, OpenListState):
            return self.compare(message.owner, message, now)
        return self.update(message.owner, message, now)


OpenChange = ListChange[OpenRequest]


def open_content(line: OpenRequest) -> str:
    """What the digest of an open list covers of a line."""
    attempt = line.attempt
    followed = "" if attempt is None else f" {attempt.term.number} {attempt.n}"
    return f"{line.request_id}{followed}"


def running_content(line: RunningRequest) -> str:
    """What the digest of a worker's list covers of a line: all of it."""
    term, detokenizer = line.attempt.term, line.detokenizer or ""
    flags = 4 * line.ended + 2 * line.waiting + line.returned
    return (
        f"{line.request_id} {term.number} {line.attempt.n} {line.tokens} {flags} "
        f"{detokenizer} {line.detokenizer_incarnation or ''}"
    )
