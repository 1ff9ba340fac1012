"""Sessions: what was said before, kept as token ids, so that a request may go on from it.

A session is a tree: each request that has ended is a node under the one that it went on from. It is
kept by the gateway that opened it, in memory, and goes with it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.wire.errors import InvalidRequest, Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SESSIONS_MAX = 1024
IDLE_S = 3600.0
"""How long a session that names no time of its own is kept after its last request."""


@dataclass(slots=True)
class Node:
    """One request of a session.

    Attributes:
        prompt_ids: All that it was asked, what came before it included.
        characters: Of what was new in it, and of its answer.
        output_ids: Its answer, once it has ended.
        below: The requests that went on from it.
    """

    prompt_ids: tuple[int, ...]
    characters: int
    output_ids: tuple[int, ...] | None = None
    below: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Session:
    """What one client keeps. `characters_max` 0 sets no bound.

    Attributes:
        nodes: Requests that run or have ended, by name.
        entering: Requests that are not accepted yet: they change nothing of the tree.
    """

    characters_max: int
    idle_s: float
    used_at: float
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    entering: dict[str, Node] = field(default_factory=dict[str, Node])

    @property
    def characters(self) -> int:
        """Characters of all that it holds."""
        held = (*self.nodes.values(), *self.entering.values())
        return sum(node.characters for node in held)

    def replaced(self, place: Place) -> set[str]:
        """The requests that one at this place takes the place of, and all below them."""
        if not place.replace:
            return set()
        if place.rid is None:
            return set(self.nodes)
        node = self.nodes.get(place.rid)
        return self.under(node.below if node else ())

    def under(self, rids: Iterable[str]) -> set[str]:
        """These requests, and all that went on from them."""
        found, pending = set[str](), list(rids)
        while pending:
            rid = pending.pop()
            if rid in self.nodes:
                found.add(rid)
                pending += self.nodes[rid].below
        return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a session a request stands, as the client says it."""

    session: str
    rid: str | None = None
    offset: int | None = None
    replace: bool = False
    drop_previous_output: bool = False


class Sessions:
    """Every session of this gateway. `abort` ends requests by their names."""

    def __init__(self, now: Callable[[], float], abort: Callable[[str], None]) -> None:
        self._now = now
        self._abort = abort
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, name: str | None, characters_max: int, idle_s: float | None) -> str:
        """Begin a session and return its name.

        Raises:
            InvalidRequest: There is one of this name.
            Overloaded: There are as many as may be.
        """
        self._reap()
        name = name or secrets.token_hex(16)
        if name in self._sessions:
            raise InvalidRequest(f"session '{name}' is open", param="session_id")
        if len(self._sessions) >= SESSIONS_MAX:
            text = f"{SESSIONS_MAX} sessions are open, the limit"
            raise Overloaded(text, retry_after_s=60.0)
        self._sessions[name] = Session(characters_max, idle_s or IDLE_S, self._now())
        return name

    def close(self, name: str) -> None:
        """Forget a session, and abort what runs in it.

        Raises:
            InvalidRequest: There is none.
        """
        session = self._find(name, "session_id")
        for rid, node in session.nodes.items():
            if node.output_ids is None:
                self._abort(rid)
        del self._sessions[name]

    def before(self, place: Place) -> tuple[int, ...]:
        """Return the ids that a new request goes on from.

        Raises:
            InvalidRequest: There is no such session or request, or it has not ended.
        """
        session = self._find(place.session, "session_params")
        if place.rid is None:
            return ()
        node = session.nodes.get(place.rid)
        if node is None or node.output_ids is None:
            state = "is not known" if node is None else "has not ended"
            text = f"request '{place.rid}' of the session {state}"
            raise InvalidRequest(text, param="session_params.rid")
        ids = node.prompt_ids + (() if place.drop_previous_output else node.output_ids)
        return ids if place.offset is None else ids[: place.offset]

    def begin(self, place: Place, rid: str, prompt_ids: tuple[int, ...], characters: int) -> None:
        """Keep room for a request that goes on from a place, until `end`.

        Raises:
            InvalidRequest: The session is full, or has a request of this name.
        """
        session = self._find(place.session, "session_params")
        replaced = session.replaced(place)
        if rid in session.entering or rid in session.nodes.keys() - replaced:
            raise InvalidRequest(f"the session has a request '{rid}'", param="rid")
        freed = sum(session.nodes[each].characters for each in replaced)
        most = session.characters_max
        if most and session.characters - freed + characters > most:
            text = f"the session has room for {most} characters"
            raise InvalidRequest(text, param="session_params")
        session.entering[rid] = Node(prompt_ids, characters)

    def accept(self, place: Place, rid: str) -> None:
        """Give a request its place in the tree, now that it runs; drop what it replaces."""
        session = self._sessions.get(place.session)
        if session is None or rid not in session.entering:
            self._abort(rid)  # the session was closed meanwhile
            return
        self._forget(session, session.replaced(place))
        session.nodes[rid] = session.entering.pop(rid)
        if place.rid in session.nodes:
            session.nodes[place.rid].below.append(rid)

    def end(self, place: Place, rid: str, answer: tuple[tuple[int, ...], str] | None) -> None:
        """Note how a request ended: with ids and their text, or with none to go on from."""
        session = self._sessions.get(place.session)
        if session is None:
            return
        if session.entering.pop(rid, None) is not None:
            return  # it was never accepted; another of its name may be in the tree
        node = session.nodes.get(rid)
        if node is None:
            return
        session.used_at = self._now()
        if answer is None:
            self._forget(session, session.under([rid]))
            return
        node.output_ids, text = answer
        node.characters += len(text)

    def _find(self, name: str, param: str) -> Session:
        self._reap()
        session = self._sessions.get(name)
        if session is None:
            raise InvalidRequest(f"there is no session '{name}'", param=param)
        session.used_at = self._now()
        return session

    def _forget(self, session: Session, rids: set[str]) -> None:
        """Drop requests, aborting what runs."""
        for rid in rids:
            if session.nodes.pop(rid).output_ids is None:
                self._abort(rid)
        for node in session.nodes.values():
            node.below = [rid for rid in node.below if rid not in rids]

    def _reap(self) -> None:
        now = self._now()
        old = [n for n, one in self._sessions.items() if now - one.used_at > one.idle_s]
        for name in old:
            del self._sessions[name]
