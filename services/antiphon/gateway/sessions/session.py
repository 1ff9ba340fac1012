"""One session as a value: which requests are in it, and how they stand to each other. Pure.

A session is a tree: each request that has ended is a node under the one that it went on from. The
value says how much each holds, and who runs it; what was said lies beside it, request by request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.base import Process
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


@dataclass(frozen=True, slots=True)
class SessionPosition:
    """Where in a session a request stands, as the client says it."""

    session: str
    rid: str | None = None
    offset: int | None = None
    replace: bool = False
    drop_previous_output: bool = False


class SessionNode(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request of a session.

    Attributes:
        characters: Of what was new in it, and of its answer.
        above: The request that it went on from.
        owner: The gateway that runs it; None: it has ended.
        until_unix_ms: When the owner ends it, if not before.
    """

    characters: int
    above: str | None = None
    owner: Process | None = None
    until_unix_ms: int = 0


class Session(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one client keeps. `characters_max` 0 sets no bound.

    Attributes:
        idle_s: How long it is kept after its last use.
        nodes: Requests that run or have ended, by name.
        entering: Requests that are not accepted yet: they change nothing of the tree.
        closed: Nothing is in it any more. It stands there so that who was changing it sees that.
    """

    characters_max: int
    idle_s: float
    used_at_unix_ms: int
    nodes: dict[str, SessionNode] = msgspec.field(default_factory=dict[str, SessionNode])
    entering: dict[str, SessionNode] = msgspec.field(default_factory=dict[str, SessionNode])
    closed: bool = False

    @property
    def characters(self) -> int:
        """Characters of all that it holds."""
        held = (*self.nodes.values(), *self.entering.values())
        return sum(node.characters for node in held)

    def is_expired(self, unix_ms: int) -> bool:
        """Whether it was closed, or has rested for too long."""
        return self.closed or unix_ms - self.used_at_unix_ms > self.idle_s * 1000

    def close(self) -> Mapping[str, SessionNode]:
        """Have no requests any more; return those that were accepted."""
        held, self.nodes, self.entering, self.closed = self.nodes, {}, {}, True
        return held

    def check_ended(self, rid: str) -> None:
        """Check that a request may be gone on from.

        Raises:
            InvalidRequest: It is not known, or has not ended.
        """
        node = self.nodes.get(rid)
        if node is None or node.owner is not None:
            raise unknown_request(rid, "is not known" if node is None else "has not ended")

    def begin(self, place: SessionPosition, rid: str, node: SessionNode) -> None:
        """Keep room for a request, until it is accepted or has ended.

        Raises:
            InvalidRequest: The session is full, or has a request of this name.
        """
        replaced = self._replaced(place)
        if rid in self.entering or rid in self.nodes.keys() - replaced:
            raise InvalidRequest(f"the session has a request '{rid}'", param="rid")
        freed = sum(self.nodes[each].characters for each in replaced)
        most = self.characters_max
        if most and self.characters - freed + node.characters > most:
            text = f"the session has room for {most} characters"
            raise InvalidRequest(text, param="session_params")
        node.above = place.rid
        self.entering[rid] = node

    def accept(self, place: SessionPosition, rid: str) -> Mapping[str, SessionNode]:
        """Give a request its place in the tree, now that it runs; return what it replaces."""
        dropped = self._drop(self._replaced(place))
        node = self.entering.pop(rid)
        if node.above not in self.nodes:
            node.above = None
        self.nodes[rid] = node
        return dropped

    def end(self, rid: str, characters: int | None) -> Mapping[str, SessionNode]:
        """Note how a request ended: with so much, or with nothing to go on from.

        Returns:
            What goes with it.
        """
        if self.entering.pop(rid, None) is not None:
            return {}  # it was never accepted; another of its name may be in the tree
        node = self.nodes.get(rid)
        if node is None or characters is None:
            return self._drop(self._under([rid]))
        node.owner = None
        node.characters += characters
        return {}

    def prune(self, abandoned: Callable[[Process, int], bool]) -> None:
        """Drop requests whose gateway is gone: nobody will say how they ended."""
        for held in (self.nodes, self.entering):
            for rid, node in list(held.items()):
                if node.owner is not None and abandoned(node.owner, node.until_unix_ms):
                    del held[rid]

    def _replaced(self, place: SessionPosition) -> set[str]:
        """The requests that one at this place takes the place of, and all below them."""
        if not place.replace:
            return set()
        if place.rid is None:
            return set(self.nodes)
        return self._under(self._below(place.rid))

    def _under(self, rids: Iterable[str]) -> set[str]:
        """These requests, and all that went on from them."""
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
    """What is said of a request that cannot be gone on from."""
    text = f"request '{rid}' of the session {state}"
    return InvalidRequest(text, param="session_params.rid")
