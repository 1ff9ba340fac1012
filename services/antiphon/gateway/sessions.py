"""Sessions shared by gateways: conversations whose context is stored between requests.

A session is a tree: each ended request is a node below the request it continued from. The value has
the size and owner of each; their tokens are stored separately, per request. Each change is a
compare-and-swap of the value.
"""

from __future__ import annotations

import secrets
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from antiphon.bus.store import PART_BYTES, KeyValueStore, StoreLimits
from antiphon.wire.base import Process
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.errors import InvalidRequest, Unavailable
from antiphon.wire.routes import SESSIONS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from antiphon.bus.bus import Bus
    from antiphon.config.gateway import SessionsConfig
    from antiphon.wire.ids import TenantId

    Abort = Callable[[TenantId, str, Process], Awaitable[None]]

T = TypeVar("T")

Key = tuple[str, ...]

IDLE_S = 3600.0  # default idle timeout
SWAPS_MAX = 32  # maximum number of retries of a change while others change the same session


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
            raise _unknown_request(rid, "is unknown" if node is None else "has not ended")

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

    def accept(self, place: SessionParams, rid: str) -> Mapping[str, SessionNode] | None:
        """Add a running request to the tree; return the requests it replaces.

        None if it is not entering: the session was closed meanwhile.
        """
        if rid not in self.entering:
            return None
        dropped = self._drop(self._replaced(place))
        node = self.entering.pop(rid)
        if node.above not in self.nodes:
            node.above = None
        self.nodes[rid] = node
        return dropped

    def end(self, rid: str, characters: int | None) -> Mapping[str, SessionNode] | None:
        """Record the end of a request, with its size, or without output to continue from.

        Returns the requests removed with it; None if it is unknown.
        """
        if self.entering.pop(rid, None) is not None:
            return {}  # it was never accepted; another request of its name may be in the tree
        if (node := self.nodes.get(rid)) is None:
            return None
        if characters is None:
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


def _unknown_request(rid: str, state: str) -> InvalidRequest:
    text = f"request '{rid}' of the session {state}"
    return InvalidRequest(text, param="session_params.rid")


class MemorySessionStore:
    """A `KeyValueStore` in this process's memory. Evicts the oldest values beyond `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._revision = 0
        self._values: dict[Key, tuple[bytes, int]] = {}  # the oldest first

    async def read(self, *key: str) -> tuple[bytes, int] | None:
        return self._values.get(key)

    async def swap(self, *key: str, value: bytes, revision: int) -> bool:
        _, there = self._values.get(key, (b"", 0))
        if there != revision:
            return False
        await self.put(*key, value=value)
        return True

    async def get(self, *key: str) -> bytes | None:
        value, _ = self._values.get(key, (None, 0))
        return value

    async def put(self, *key: str, value: bytes) -> None:
        self._drop(key)
        self._revision += 1
        self._values[key] = (value, self._revision)
        self._bytes += len(value)
        while self._bytes > self._bytes_max:
            self._drop(next(iter(self._values)))

    async def forget(self, *key: str) -> bool:
        there = key in self._values
        for each in [each for each in self._values if each[: len(key)] == key]:
            self._drop(each)
        return there

    def _drop(self, key: Key) -> None:
        value, _ = self._values.pop(key, (b"", 0))
        self._bytes -= len(value)


SessionStore = KeyValueStore | MemorySessionStore


def session_store(config: SessionsConfig, bus: Bus) -> SessionStore:
    if not config.store:
        return MemorySessionStore(config.bytes_max)
    limits = StoreLimits(keep_s=config.keep_s, bytes_max=config.bytes_max, replicas=config.replicas)
    return KeyValueStore(bus, SESSIONS, limits)


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
            raise _unknown_request(place.rid, "is no longer stored")
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
        dropped = await self._change(tenant, place.id, lambda session: session.accept(place, rid))
        if dropped is None:
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
        characters = None if answer is None else len(answer[2])
        dropped = await self._change(tenant, place.id, lambda session: session.end(rid, characters))
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
        for rid, node in nodes.items():
            if node.owner is None:
                await self.store.forget(tenant, name, rid)
            else:
                await self.abort(tenant, rid, node.owner)


def _none(name: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"unknown session '{name}'", param=param)
