"""Sessions shared by gateways: each change is a compare-and-swap of the session's value."""

from __future__ import annotations

import secrets
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.bus.store import PART_BYTES
from antiphon.gateway.sessions.session import Session, SessionNode, unknown_request
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from antiphon.gateway.sessions.session import SessionParams
    from antiphon.gateway.sessions.store import SessionStore
    from antiphon.wire.base import Process
    from antiphon.wire.ids import TenantId

    Abort = Callable[[TenantId, str, Process], Awaitable[None]]

T = TypeVar("T")

IDLE_S = 3600.0  # default idle timeout
SWAPS_MAX = 32  # maximum number of retries of a change while others change the same session


class StoredTurn(msgspec.Struct, frozen=True):
    """Tokens of an ended request; int32, little-endian."""

    prompt_ids: bytes  # earlier context included
    output_ids: bytes


@dataclass(frozen=True)
class Sessions:
    """All sessions of the cluster; tenants cannot access each other's.

    A gateway that reads a session, changes it and finds that another has written meanwhile starts
    over, so limits are checked against the current value. All methods raise `InvalidRequest` for a
    session or request that is unknown or does not fit, and `Unavailable` if the store is.
    """

    store: SessionStore
    process: Process
    unix_ms: Callable[[], int]
    abandoned: Callable[[Process, int], bool]  # whether it is gone, or past this deadline
    abort: Abort
    _: KW_ONLY
    keep_s: float
    timeout_s: float

    async def open(
        self, tenant: TenantId, name: str | None, characters_max: int, idle_s: float | None
    ) -> str:
        name = name or secrets.token_hex(16)
        if idle_s is not None and idle_s > self.keep_s:
            text = f"timeout: must be at most {self.keep_s:g} s (sessions.keep_s)"
            raise InvalidRequest(text, param="timeout")
        session = Session(
            characters_max=characters_max,
            idle_s=idle_s or min(IDLE_S, self.keep_s),
            used_at_unix_ms=self.unix_ms(),
        )
        there, revision = await self._read(tenant, name)
        value = msgspec.msgpack.encode(session)
        # Requests of an earlier session with this name are not in its tree, so they are not found.
        if there is None and await self.store.swap(tenant, name, value=value, revision=revision):
            return name
        raise InvalidRequest(f"session '{name}' is already open", param="session_id")

    async def close(self, tenant: TenantId, name: str) -> None:
        """Close a session and abort its running requests."""
        # Also a swap: a request being accepted is in it, or sees that it is closed.
        held = await self._change(tenant, name, Session.close)
        if held is None:
            raise _none(name, "session_id")
        await self._drop(tenant, name, held)

    async def previous_ids(self, tenant: TenantId, place: SessionParams) -> tuple[int, ...]:
        """Return the token ids that a new request continues from."""
        session, _ = await self._read(tenant, place.id)
        if session is None:
            raise _none(place.id, "session_params")
        if place.rid is None:
            return ()
        session.check_ended(place.rid)
        value = await self.store.get(tenant, place.id, place.rid)
        if value is None:
            raise unknown_request(place.rid, "is no longer stored")
        turn = msgspec.msgpack.decode(value, type=StoredTurn)
        ids = turn.prompt_ids + (b"" if place.drop_previous_output else turn.output_ids)
        kept = unpack_ids(ids)
        return tuple(kept[: place.offset] if place.offset else kept)

    async def begin(
        self, tenant: TenantId, place: SessionParams, rid: str, characters: int
    ) -> None:
        """Reserve space for a request, until `end`."""
        node = SessionNode(
            characters=characters,
            owner=self.process,
            until_unix_ms=self.unix_ms() + round(self.timeout_s * 1000),
        )

        def begin(session: Session) -> bool:
            session.begin(place, rid, node)
            return True

        if await self._change(tenant, place.id, begin) is None:
            raise _none(place.id, "session_params")

    async def accept(self, tenant: TenantId, place: SessionParams, rid: str) -> None:
        """Add a running request to the tree; drop the requests it replaces."""

        def accept(session: Session) -> Mapping[str, SessionNode] | None:
            return session.accept(place, rid) if rid in session.entering else None

        dropped = await self._change(tenant, place.id, accept)
        if dropped is None:  # the session was closed meanwhile
            await self.abort(tenant, rid, self.process)
            return
        await self._drop(tenant, place.id, dropped)

    async def end(
        self,
        tenant: TenantId,
        place: SessionParams,
        rid: str,
        answer: tuple[tuple[int, ...], tuple[int, ...], str] | None,
    ) -> None:
        """Record the end of a request, with its prompt, output and text if it can be continued.

        If that is unavailable, it counts as ended after its deadline.
        """
        if answer is not None:
            prompt_ids, output_ids, _ = answer
            turn = StoredTurn(pack_ids(prompt_ids), pack_ids(output_ids))
            value = msgspec.msgpack.encode(turn)
            await self.store.put(tenant, place.id, rid, value=value)

        def end(session: Session) -> Mapping[str, SessionNode] | None:
            if rid not in session.entering and rid not in session.nodes:
                return None
            return session.end(rid, None if answer is None else len(answer[2]))

        dropped = await self._change(tenant, place.id, end)
        if dropped is None and answer is not None:
            # It was closed or replaced meanwhile, so its tokens belong to no request.
            await self.store.forget(tenant, place.id, rid)
        # Another request may have its name by now: only requests that continued from it are
        # aborted.
        below = {name: node for name, node in (dropped or {}).items() if name != rid}
        await self._drop(tenant, place.id, below)

    async def _read(self, tenant: TenantId, name: str) -> tuple[Session | None, int]:
        """Read an open session, and the revision of its value."""
        found = await self.store.read(tenant, name)
        if found is None:
            return None, 0
        value, revision = found
        session = msgspec.msgpack.decode(value, type=Session)
        if session.is_expired(self.unix_ms()):
            return None, revision
        session.prune(self.abandoned)
        return session, revision

    async def _change(
        self, tenant: TenantId, name: str, change: Callable[[Session], T | None]
    ) -> T | None:
        """Change a session; None if it does not exist, or `change` returns None.

        Only `begin` makes it larger, so only a new request can be rejected for its size.
        """
        for _ in range(SWAPS_MAX):
            session, revision = await self._read(tenant, name)
            changed = None if session is None else change(session)
            if session is None or changed is None:
                return None
            session.used_at_unix_ms = self.unix_ms()
            value = msgspec.msgpack.encode(session)
            if len(value) > PART_BYTES:
                text = f"the session is full: it has {len(session.nodes)} requests"
                raise InvalidRequest(text, param="session_params")
            if await self.store.swap(tenant, name, value=value, revision=revision):
                return changed
        raise Unavailable(
            f"session '{name}' has too many concurrent changes; retry later", retry_after_s=1.0
        )

    async def _drop(self, tenant: TenantId, name: str, nodes: Mapping[str, SessionNode]) -> None:
        """Delete the tokens of requests, and abort running ones."""
        for rid, node in nodes.items():
            if node.owner is None:
                await self.store.forget(tenant, name, rid)
            else:
                await self.abort(tenant, rid, node.owner)


def _none(name: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"unknown session '{name}'", param=param)
