"""Sessions as gateways keep them together: each change is one swap of a session's value."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.bus.store import PART_BYTES
from antiphon.gateway.sessions.session import Session, SessionNode, unknown_request
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from antiphon.gateway.sessions.session import SessionPosition
    from antiphon.gateway.sessions.store import SessionStore
    from antiphon.wire.base import Process
    from antiphon.wire.ids import TenantId

    Abort = Callable[[TenantId, str, Process], Awaitable[None]]

T = TypeVar("T")

IDLE_S = 3600.0
"""How long a session that names no time of its own is kept after its last request."""
SWAPS_MAX = 32
"""How often a change is tried over while others change the same session."""


class StoredTurn(msgspec.Struct, frozen=True):
    """What was said in a request that has ended; int32, little-endian.

    Attributes:
        prompt_ids: All that it was asked, what came before it included.
        output_ids: Its answer.
    """

    prompt_ids: bytes
    output_ids: bytes


class Sessions:
    """Every session of the cluster, whichever gateway asks; no tenant finds another's.

    Two gateways change a session by turns: who reads it, changes it, and finds that another has
    written meanwhile, does so again. So what is refused is refused by what is there.
    """

    def __init__(
        self,
        store: SessionStore,
        process: Process,
        unix_ms: Callable[[], int],
        abandoned: Callable[[Process, int], bool],
        abort: Abort,
        *,
        keep_s: float,
        timeout_s: float,
    ) -> None:
        """Nothing is read yet.

        Args:
            store: Where sessions lie.
            process: This gateway.
            unix_ms: The time.
            abandoned: Whether a gateway is gone, or has had all its time until then.
            abort: Ends a request of a tenant by its name, which that gateway runs.
            keep_s: How long the shelf keeps what was said.
            timeout_s: How long a request may take.
        """
        self._store = store
        self._process = process
        self._unix_ms = unix_ms
        self._abandoned = abandoned
        self._abort = abort
        self._keep_s = keep_s
        self._timeout_s = timeout_s

    async def open(
        self, tenant: TenantId, name: str | None, characters_max: int, idle_s: float | None
    ) -> str:
        """Begin a session and return its name.

        Raises:
            InvalidRequest: There is one of this name, or it would rest for longer than is kept.
            Unavailable: It cannot be kept now.
        """
        name = name or secrets.token_hex(16)
        if idle_s is not None and idle_s > self._keep_s:
            text = f"timeout: at most {self._keep_s:g} s (sessions.keep_s)"
            raise InvalidRequest(text, param="timeout")
        session = Session(
            characters_max=characters_max,
            idle_s=idle_s or min(IDLE_S, self._keep_s),
            used_at_unix_ms=self._unix_ms(),
        )
        there, revision = await self._read(tenant, name)
        value = msgspec.msgpack.encode(session)
        # What was said in one of this name before is not found: it is none of its requests.
        if there is None and await self._store.swap(tenant, name, value=value, revision=revision):
            return name
        raise InvalidRequest(f"session '{name}' is open", param="session_id")

    async def close(self, tenant: TenantId, name: str) -> None:
        """Forget a session, and abort what runs in it.

        Raises:
            InvalidRequest: There is none.
            Unavailable: It may still be kept.
        """
        # By a swap, too: a request that is being accepted is in it, or sees that it is closed.
        held = await self._change(tenant, name, Session.close)
        if held is None:
            raise _none(name, "session_id")
        await self._drop(tenant, name, held)

    async def previous_ids(self, tenant: TenantId, place: SessionPosition) -> tuple[int, ...]:
        """Return the ids that a new request goes on from.

        Raises:
            InvalidRequest: There is no such session or request, or it has not ended.
            Unavailable: It cannot be read now.
        """
        session, _ = await self._read(tenant, place.session)
        if session is None:
            raise _none(place.session, "session_params")
        if place.rid is None:
            return ()
        session.check_ended(place.rid)
        value = await self._store.get(tenant, place.session, place.rid)
        if value is None:
            raise unknown_request(place.rid, "is kept no longer")
        said = msgspec.msgpack.decode(value, type=StoredTurn)
        ids = said.prompt_ids + (b"" if place.drop_previous_output else said.output_ids)
        kept = unpack_ids(ids)
        return tuple(kept[: place.offset] if place.offset else kept)

    async def begin(
        self, tenant: TenantId, place: SessionPosition, rid: str, characters: int
    ) -> None:
        """Keep room for a request that goes on from a place, until `end`.

        Raises:
            InvalidRequest: The session is gone or full, or has a request of this name.
            Unavailable: It cannot be changed now.
        """
        node = SessionNode(
            characters=characters,
            owner=self._process,
            until_unix_ms=self._unix_ms() + round(self._timeout_s * 1000),
        )

        def begin(session: Session) -> bool:
            session.begin(place, rid, node)
            return True

        if await self._change(tenant, place.session, begin) is None:
            raise _none(place.session, "session_params")

    async def accept(self, tenant: TenantId, place: SessionPosition, rid: str) -> None:
        """Give a request its place in the tree, now that it runs; drop what it replaces.

        Raises:
            Unavailable: It cannot be changed now.
        """

        def accept(session: Session) -> Mapping[str, SessionNode] | None:
            return session.accept(place, rid) if rid in session.entering else None

        dropped = await self._change(tenant, place.session, accept)
        if dropped is None:  # the session was closed meanwhile
            await self._abort(tenant, rid, self._process)
            return
        await self._drop(tenant, place.session, dropped)

    async def end(
        self,
        tenant: TenantId,
        place: SessionPosition,
        rid: str,
        answer: tuple[tuple[int, ...], tuple[int, ...], str] | None,
    ) -> None:
        """Note how a request ended: with prompt, answer and its text, or with none to go on from.

        Raises:
            Unavailable: It cannot be noted now. It counts as ended when its time is over.
        """
        if answer is not None:
            prompt_ids, output_ids, _ = answer
            said = StoredTurn(pack_ids(prompt_ids), pack_ids(output_ids))
            value = msgspec.msgpack.encode(said)
            await self._store.put(tenant, place.session, rid, value=value)

        def end(session: Session) -> Mapping[str, SessionNode] | None:
            if rid not in session.entering and rid not in session.nodes:
                return None
            return session.end(rid, None if answer is None else len(answer[2]))

        dropped = await self._change(tenant, place.session, end)
        if dropped is None and answer is not None:
            # It was closed or replaced meanwhile, and what was said belongs to nothing.
            await self._store.forget(tenant, place.session, rid)
        # By now another request may bear its name: only what went on from it is aborted.
        below = {name: node for name, node in (dropped or {}).items() if name != rid}
        await self._drop(tenant, place.session, below)

    async def _read(self, tenant: TenantId, name: str) -> tuple[Session | None, int]:
        """A session that is not over, and the revision of what is there."""
        found = await self._store.read(tenant, name)
        if found is None:
            return None, 0
        value, revision = found
        session = msgspec.msgpack.decode(value, type=Session)
        if session.is_expired(self._unix_ms()):
            return None, revision
        session.prune(self._abandoned)
        return session, revision

    async def _change(
        self, tenant: TenantId, name: str, change: Callable[[Session], T | None]
    ) -> T | None:
        """Change a session; None where there is none, or `change` has nothing to do.

        Only `begin` makes it larger, so that only a new request can be refused for its size.
        """
        for _ in range(SWAPS_MAX):
            session, revision = await self._read(tenant, name)
            changed = None if session is None else change(session)
            if session is None or changed is None:
                return None
            session.used_at_unix_ms = self._unix_ms()
            value = msgspec.msgpack.encode(session)
            if len(value) > PART_BYTES:
                text = f"the session has {len(session.nodes)} requests, and no room for another"
                raise InvalidRequest(text, param="session_params")
            if await self._store.swap(tenant, name, value=value, revision=revision):
                return changed
        raise Unavailable(f"session '{name}' changes all the time", retry_after_s=1.0)

    async def _drop(self, tenant: TenantId, name: str, nodes: Mapping[str, SessionNode]) -> None:
        """Forget what requests have said, aborting what runs."""
        for rid, node in nodes.items():
            if node.owner is None:
                await self._store.forget(tenant, name, rid)
        await self._end_all(tenant, nodes)

    async def _end_all(self, tenant: TenantId, nodes: Mapping[str, SessionNode]) -> None:
        for rid, node in nodes.items():
            if node.owner is not None:
                await self._abort(tenant, rid, node.owner)


def _none(name: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"there is no session '{name}'", param=param)
