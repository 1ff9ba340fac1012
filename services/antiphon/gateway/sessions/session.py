"""One session as a value: its requests and how they relate. Pure.

A session is a tree: each ended request is a node below the request it continued from. The value has
the size and owner of each; their tokens are stored separately, per request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.wire.base import Process
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class SessionParams(msgspec.Struct, frozen=True):
    """Position of a request in a session."""

    id: str
    """Session id."""
    rid: str | None = None
    """Request to continue from. If unset, the request starts from an empty context."""
    offset: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Number of tokens of the earlier context to keep. 0 or unset keeps all of it; a negative value
    drops that many from the end."""
    replace: bool | None = None
    """Whether to abort and discard other requests that continue from the same one."""
    drop_previous_output: bool | None = None
    """Whether to drop the output of the request continued from."""


class SessionNode(msgspec.Struct, kw_only=True, omit_defaults=True):
    characters: int  # of its new prompt part and its output
    above: str | None = None  # the request it continued from
    owner: Process | None = None  # the gateway that runs it; None if it has ended
    until_unix_ms: int = 0  # when the owner ends it at the latest


class Session(msgspec.Struct, kw_only=True, omit_defaults=True):
    characters_max: int  # 0 sets no limit
    idle_s: float
    used_at_unix_ms: int
    nodes: dict[str, SessionNode] = msgspec.field(default_factory=dict[str, SessionNode])
    # Requests that are not accepted yet are not in the tree.
    entering: dict[str, SessionNode] = msgspec.field(default_factory=dict[str, SessionNode])
    closed: bool = False  # the value remains, so that concurrent changes see it

    @property
    def characters(self) -> int:
        requests = (*self.nodes.values(), *self.entering.values())
        return sum(node.characters for node in requests)

    def is_expired(self, unix_ms: int) -> bool:
        return self.closed or unix_ms - self.used_at_unix_ms > self.idle_s * 1000

    def close(self) -> Mapping[str, SessionNode]:
        """Remove all requests; return those that were accepted."""
        held, self.nodes, self.entering, self.closed = self.nodes, {}, {}, True
        return held

    def check_ended(self, rid: str) -> None:
        node = self.nodes.get(rid)
        if node is None or node.owner is not None:
            raise unknown_request(rid, "is unknown" if node is None else "has not ended")

    def begin(self, place: SessionParams, rid: str, node: SessionNode) -> None:
        """Reserve space for a request, until it is accepted or has ended."""
        replaced = self._replaced(place)
        if rid in self.entering or rid in self.nodes.keys() - replaced:
            raise InvalidRequest(f"the session already has a request '{rid}'", param="rid")
        freed = sum(self.nodes[each].characters for each in replaced)
        most = self.characters_max
        if most and self.characters - freed + node.characters > most:
            text = f"the session is full: its capacity is {most} characters"
            raise InvalidRequest(text, param="session_params")
        node.above = place.rid
        self.entering[rid] = node

    def accept(self, place: SessionParams, rid: str) -> Mapping[str, SessionNode]:
        """Add a running request to the tree; return the requests it replaces."""
        dropped = self._drop(self._replaced(place))
        node = self.entering.pop(rid)
        if node.above not in self.nodes:
            node.above = None
        self.nodes[rid] = node
        return dropped

    def end(self, rid: str, characters: int | None) -> Mapping[str, SessionNode]:
        """Record the end of a request, with its size, or without output to continue from.

        Returns the requests removed with it.
        """
        if self.entering.pop(rid, None) is not None:
            return {}  # it was never accepted; another request of its name may be in the tree
        node = self.nodes.get(rid)
        if node is None or characters is None:
            return self._drop(self._under([rid]))
        node.owner = None
        node.characters += characters
        return {}

    def prune(self, abandoned: Callable[[Process, int], bool]) -> None:
        """Remove requests whose gateway is gone and cannot report their end."""
        for requests in (self.nodes, self.entering):
            for rid, node in list(requests.items()):
                if node.owner is not None and abandoned(node.owner, node.until_unix_ms):
                    del requests[rid]

    def _replaced(self, place: SessionParams) -> set[str]:
        """Return the requests that one at this position replaces, and all below them."""
        if not place.replace:
            return set()
        if place.rid is None:
            return set(self.nodes)
        return self._under(self._below(place.rid))

    def _under(self, rids: Iterable[str]) -> set[str]:
        """Return these requests and all that continued from them."""
        found, pending = set[str](), list(rids)
        while pending:
            rid = pending.pop()
            if rid in self.nodes and rid not in found:
                found.add(rid)
                pending += self._below(rid)
        return found

    def _below(self, rid: str) -> list[str]:
        return [name for name, node in self.nodes.items() if node.above == rid]

    def _drop(self, rids: Iterable[str]) -> Mapping[str, SessionNode]:
        return {rid: self.nodes.pop(rid) for rid in rids}


def unknown_request(rid: str, state: str) -> InvalidRequest:
    text = f"request '{rid}' of the session {state}"
    return InvalidRequest(text, param="session_params.rid")
