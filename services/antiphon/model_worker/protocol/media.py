"""What requests need and messages do not have: embeddings of media, and long prompts.

Prompts are fetched from the gateways that own them, before a request runs; embeddings from
encoders, for requests that are about to need them.

The batching loop calls `load` and `release`, which return at once; everything else is done in the
event loop. Encoders are called again until the request's deadline: the medium is at its owner, and
they hold nothing that is not found again. If the owner is gone, the request ends, unless another
gateway takes its place: its claims are read anew for each call. A medium has an encoder that is
asked first, which may have it in its cache; the next one is asked where that one is gone, has too
much to do, or does not reach the owner.

Tenants take turns, for memory and for encoders.

Encoders of one digest are asked at a time. It is a part of the keys of pages, and goes by what
encoders announce: a worker that knows none yet has loads wait, and takes the digest of the first.
While encoders are replaced by others with another model it is that of most of them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.bus.transport import NoResponders
from antiphon.model_worker.batching.media import MediaLoad, MediaLoaded
from antiphon.model_worker.protocol.rendezvous import rendezvous
from antiphon.service.clock import remaining_s
from antiphon.service.peers import Liveness, PeerChange
from antiphon.service.tasks import gather, isolated
from antiphon.service.tenant_slots import TenantSlots
from antiphon.telemetry import catalog
from antiphon.transfer.blobs import (
    PART_BYTES,
    BlobUnreachable,
    fetch,
    fetch_range,
    medium_lost,
)
from antiphon.wire.base import Role
from antiphon.wire.claim import MEDIUM_GONE, MEDIUM_LOST, EncodeImage
from antiphon.wire.errors import (
    DeadlineExceeded,
    EngineError,
    Internal,
    Overloaded,
    RequestTooLarge,
    Unavailable,
)
from antiphon.wire.routes import ENCODE_IMAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.plan import Floats
    from antiphon.model_worker.batching.state import ChoiceKey, MediumRows
    from antiphon.model_worker.protocol.held_request import HeldRequest
    from antiphon.model_worker.protocol.worker_output import DropPrompt, FetchPrompt
    from antiphon.service.peers import Peer
    from antiphon.service.service import Runtime
    from antiphon.wire.base import Attempt, Process
    from antiphon.wire.claim import Claim
    from antiphon.wire.heartbeat import Heartbeat
    from antiphon.wire.ids import ModelName, RequestId, TenantId
    from antiphon.wire.media import Medium

log = logging.getLogger(__name__)

ATTEMPT_S = 30.0
"""Maximum time of one call and the fetch after it. A death is noticed sooner, by heartbeats."""
RETRY_S = 0.1
RETRY_MAX_S = 1.0
CALLS_MAX = 8
"""Calls that an encoder has of this worker at a time, for images and for videos, and one more for
each tenant that has none: enough for its processes and its thread to be busy, and few to wait for.
"""
NUMBER_BYTES = 4
"""Embeddings are float32."""
PROMPT_TRY_S = 5.0
"""Maximum time of one connection for a prompt."""
PROMPT_RETRY_S = 0.2
GATEWAY_LOST_S = 20.0
"""How long a gateway may be unreachable. One that is silent counts as dead after 15 s, and its
requests are dropped; one that lives listens where workers cannot connect."""


class MediumLost(Unavailable):
    """A medium of a request is not where its claim says, and will not be there again.

    Attributes:
        index: Of the medium in the request.
        claim: What was to be fetched.
    """

    index: int
    claim: Claim

    @classmethod
    def of(cls, index: int, claim: Claim) -> MediumLost:
        text = "the gateway that held a medium of the request is gone; send the request again"
        lost = cls(text, param=f"media.{index}", retry_after_s=1.0)
        lost.index, lost.claim = index, claim
        return lost


class EmbeddingClient:
    """Embeddings by encoders, as the batching loop's `MediaStore`.

    What is loaded and not released takes at most `bytes_max`; further loads wait. `width` is that
    of the embeddings, and `held` finds a request while it is here. `use_tower` is called with each
    digest of the model that makes them from then on; the first one is empty, that of encoders up to
    version 0.4, which announce none.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: ModelName,
        *,
        width: int,
        bytes_max: int,
        held: Callable[[RequestId], HeldRequest | None],
        land: Callable[[MediaLoaded], None],
        use_tower: Callable[[str], None],
    ) -> None:
        self._runtime = runtime
        self._model = model
        self._width = width
        self._held = held
        self._land = land
        self._tower, self._use_tower = "", use_tower
        self._budget = ByteBudget(bytes_max)
        self._event_loop = asyncio.get_running_loop()
        self._loads: dict[tuple[ChoiceKey, int], asyncio.Task[None]] = {}
        self._attempts: dict[asyncio.Timeout, Process] = {}
        self._slots: dict[tuple[Process, bool], TenantSlots] = {}  # by encoder; of videos, too
        self._fetch_seconds = runtime.metrics.histogram(catalog.EMBEDDING_FETCH_SECONDS)
        runtime.peers.watch(self._on_peer)
        self._follow_tower()

    # The batching loop's side.

    def load(self, load: MediaLoad) -> None:
        self._event_loop.call_soon_threadsafe(self._begin, load)

    def release(self, key: ChoiceKey, number: int) -> None:
        self._event_loop.call_soon_threadsafe(self._end, key, number)

    # The event loop's side.

    @property
    def bytes_held(self) -> int:
        return self._budget.held

    def _begin(self, load: MediaLoad) -> None:
        task = self._runtime.group.create_task(isolated(self._run, load), name="media")
        self._loads[load.key, load.number] = task

    def _end(self, key: ChoiceKey, number: int) -> None:
        if (task := self._loads.pop((key, number), None)) is not None:
            task.cancel()
            self._budget.free((key, number))

    async def _run(self, load: MediaLoad) -> None:
        """Load embeddings, and report; their bytes stay counted until the load is released."""
        done = MediaLoaded(load.key, load.number, error=Internal("internal error"))
        try:
            async with asyncio.timeout(self._left_s(load)):
                done = MediaLoaded(load.key, load.number, await self._loaded(load))
        except TimeoutError:
            error = DeadlineExceeded("the request's media were not embedded in time")
            done = MediaLoaded(load.key, load.number, error=error)
        except EngineError as error:
            done = MediaLoaded(load.key, load.number, error=error)
        finally:
            if done.error is not None:
                self._loads.pop((load.key, load.number), None)
                self._budget.free((load.key, load.number))
            self._land(done)

    async def _loaded(self, load: MediaLoad) -> dict[int, Floats]:
        """Load all rows; a request whose gateway is lost waits for another one, if it can have it.

        Raises:
            EngineError: A medium is at fault, or lost.
        """
        while True:
            try:
                return await self._rows(load)
            except MediumLost as lost:
                self._budget.free((load.key, load.number))  # others take it while this one waits
                await self._claim_changed(load, lost)

    async def _rows(self, load: MediaLoad) -> dict[int, Floats]:
        size_bytes = sum(self._size_bytes(wanted) for wanted in load.media.values())
        await self._budget.take((load.key, load.number), size_bytes, load.tenant)
        pairs = [*load.media.items()]
        rows = await gather([self._embedding(load, index, wanted) for index, wanted in pairs])
        return {index: each for (index, _), each in zip(pairs, rows, strict=True)}

    async def _claim_changed(self, load: MediaLoad, lost: MediumLost) -> None:
        """Wait until a lost medium is at another gateway, at which its client resumes the stream.

        Raises:
            MediumLost: No gateway has adopted the request in its window, or it has no medium.
        """
        held, clock = self._held(load.request_id), self._runtime.clock
        resume_ms = 0 if held is None else held.resume_ms
        until = clock.now() + (resume_ms / 1000 + GATEWAY_LOST_S if resume_ms else 0.0)
        while self._medium(load, lost.index).claim == lost.claim:
            if clock.now() >= until:
                fields = {"request_id": load.request_id, "medium": lost.index}
                log.warning("medium lost", extra=fields)
                raise lost
            await asyncio.sleep(RETRY_S)

    def _medium(self, load: MediaLoad, index: int) -> Medium:
        """A medium of a load, with its claim at the gateway that its request has by now."""
        held = self._held(load.request_id)
        return load.media[index].medium if held is None else held.media[index]

    def _size_bytes(self, wanted: MediumRows) -> int:
        """Memory of these rows, and of parts at their ends."""
        rows = wanted.last - wanted.first
        part_bytes = max(PART_BYTES, wanted.medium.claim.part_bytes)
        parts = 2 * part_bytes if rows < wanted.medium.span.rows else 0
        return rows * self._width * NUMBER_BYTES + parts

    async def _embedding(self, load: MediaLoad, index: int, wanted: MediumRows) -> Floats:
        """Call encoders until one has answered: (rows, width).

        Raises:
            MediumLost: Its owner is gone.
            EngineError: The medium is at fault; the error names its index.
        """
        pause_s, passed = RETRY_S, 0
        clock, lost_at = self._runtime.clock, math.inf
        while True:
            medium = self._medium(load, index)
            if medium.claim != wanted.medium.claim:
                wanted, lost_at = msgspec.structs.replace(wanted, medium=medium), math.inf
            try:
                if medium.embedded:
                    return await self._sent(wanted, self._left_s(load))
                encoder = self._encoder(medium, load.tower, passed)
                return await self._in_turn(load, wanted, encoder)
            except (Unavailable, Overloaded, DeadlineExceeded) as error:
                fields = {"request_id": load.request_id, "code": error.code, "medium": index}
                log.info("medium not embedded yet", extra={**fields, "reason": error.message})
                lost = error.details.get(MEDIUM_LOST)
                if lost is not None:
                    lost_at = min(lost_at, clock.now())
                    if lost == MEDIUM_GONE or clock.now() - lost_at >= GATEWAY_LOST_S:
                        raise MediumLost.of(index, medium.claim) from error
                # One that is slow goes on with it, and has it when it is asked again.
                passed += isinstance(error, Overloaded | NoResponders) or lost is not None
            except EngineError as error:
                error.param = f"media.{index}"
                raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def _sent(self, wanted: MediumRows, left_s: float) -> Floats:
        """Fetch rows of what a client has embedded, from their owner."""
        claim, rows = wanted.medium.claim, wanted.medium.span.rows
        if claim.size_bytes != rows * self._width * NUMBER_BYTES:
            raise Internal(f"an embedding has {claim.size_bytes} bytes, not {rows} rows")
        with self._fetch_seconds.time(), medium_lost():
            return await self._fetched(claim, wanted, min(left_s, ATTEMPT_S))

    def _ready(self) -> list[Heartbeat]:
        peers = self._runtime.peers.accepting_work(Role.ENCODER)
        return [peer.heartbeat for peer in peers if peer.heartbeat.model == self._model]

    def _follow_tower(self) -> None:
        """Use the tower of most encoders: the one before, unless there are more of another.

        While none is ready it stays the same: what is cached is found without an encoder.
        """
        towers = Counter(beat.tower for beat in self._ready())
        most = max(towers.values(), default=0)
        if towers[self._tower] == most:
            return
        self._tower = max(tower for tower, count in towers.items() if count == most)
        log.info("tower changed", extra={"digest": self._tower, "encoders": most})
        self._use_tower(self._tower)

    def _encoder(self, medium: Medium, tower: str, passed: int) -> Process:
        """Return the encoder with this tower that is asked for a medium after `passed` others.

        Raises:
            Unavailable: None is ready.
        """
        ready = [beat.process for beat in self._ready() if beat.tower == tower]
        if not ready:
            raise Unavailable("no encoder is ready", retry_after_s=RETRY_S)
        digest = medium.claim.digest
        ready.sort(key=lambda process: rendezvous(process.instance, digest), reverse=True)
        return ready[passed % len(ready)]

    async def _in_turn(self, load: MediaLoad, wanted: MediumRows, encoder: Process) -> Floats:
        """Call an encoder once it is the tenant's turn. The wait ends with the encoder."""
        key = encoder, wanted.medium.video is not None
        slots = self._slots.setdefault(key, TenantSlots(CALLS_MAX))
        try:
            async with asyncio.timeout(self._left_s(load)) as attempt:
                self._attempts[attempt] = encoder
                try:
                    async with slots.held(load.tenant):
                        timeout_s = min(self._left_s(load), ATTEMPT_S)
                        async with asyncio.timeout(timeout_s):
                            return await self._attempt(load, wanted, encoder, timeout_s)
                finally:
                    del self._attempts[attempt]
        except TimeoutError:
            raise Unavailable("the encoder did not answer", retry_after_s=RETRY_S) from None

    async def _attempt(
        self, load: MediaLoad, wanted: MediumRows, encoder: Process, timeout_s: float
    ) -> Floats:
        medium, tokens = wanted.medium, wanted.medium.span.rows
        clock = self._runtime.clock
        request = EncodeImage(
            request_id=load.request_id,
            model=self._model,
            claim=medium.claim,
            width=medium.width,
            height=medium.height,
            limits=medium.limits,
            video=medium.video,
            audio=medium.audio,
            deadline_unix_ms=clock.unix_ms() + round(timeout_s * 1000),
            left_ms=round(timeout_s * 1000),
            tenant=load.tenant,
        )
        reply = await self._runtime.bus.call(
            ENCODE_IMAGE, request, timeout_s=timeout_s, encoder=encoder.instance
        )
        if reply.tower != load.tower:
            # Another process has its name now, whose heartbeat is about to come.
            raise Unavailable("the encoder has another model now", retry_after_s=RETRY_S)
        if (reply.tokens, reply.hidden) != (tokens, self._width):
            raise Internal(
                f"an encoder made {reply.tokens} x {reply.hidden} numbers of an image, "
                f"not {tokens} x {self._width}"
            )
        with self._fetch_seconds.time():
            return await self._fetched(reply.claim, wanted, timeout_s)

    async def _fetched(self, claim: Claim, wanted: MediumRows, timeout_s: float) -> Floats:
        """Fetch rows of an embedding; all of one that is too small to have parts."""
        row_bytes, total = self._width * NUMBER_BYTES, wanted.medium.span.rows
        first, last = wanted.first, wanted.last
        if claim.part_bytes and last - first < total:
            start, end = first * row_bytes, last * row_bytes
            data = await fetch_range(claim, start, end, timeout_s=timeout_s)
            return np.frombuffer(data, "<f4").reshape(last - first, self._width)
        data = await fetch(claim, timeout_s=timeout_s, bytes_max=total * row_bytes)
        rows = np.frombuffer(data, "<f4").reshape(total, self._width)
        return rows if last - first == total else rows[first:last].copy()

    def _left_s(self, load: MediaLoad) -> float:
        return remaining_s(load.deadline_unix_ms, self._runtime.clock)

    def _on_peer(self, change: PeerChange, peer: Peer) -> None:
        """End the calls of an encoder that has died, or is suspect: others are asked at once."""
        if peer.heartbeat.role is Role.ENCODER:
            self._follow_tower()
        if change is PeerChange.DIED:
            for videos in (False, True):
                self._slots.pop((peer.process, videos), None)
        if change is PeerChange.DIED or peer.liveness is not Liveness.ALIVE:
            for attempt, encoder in self._attempts.items():
                if encoder == peer.process and not attempt.expired():
                    attempt.reschedule(self._event_loop.time())


class ByteBudget:
    """Bytes that are held under keys, up to a number.

    Keys beyond it wait: in order within a tenant, round-robin between tenants.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: dict[object, int] = {}
        self._waiting = OrderedDict["TenantId", deque[tuple[object, int, asyncio.Future[None]]]]()

    @property
    def held(self) -> int:
        return sum(self._held.values())

    async def take(self, key: object, size_bytes: int, tenant: TenantId) -> None:
        """Wait until there is room, and hold so many bytes.

        Raises:
            RequestTooLarge: There will never be room.
        """
        if size_bytes > self._bytes_max:
            raise RequestTooLarge.of(size_bytes=size_bytes, bytes_max=self._bytes_max)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((key, size_bytes, waiter))
        self._grant()
        try:
            await waiter
        except BaseException:
            self.free(key)
            raise

    def free(self, key: object) -> None:
        """Free what is held under a key, or give up waiting. Unknown keys are ignored."""
        self._held.pop(key, None)
        for tenant, waiting in [*self._waiting.items()]:
            if left := deque(each for each in waiting if each[0] != key):
                self._waiting[tenant] = left
            else:
                del self._waiting[tenant]
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            tenant, waiting = next(iter(self._waiting.items()))
            key, size_bytes, waiter = waiting[0]
            if self.held + size_bytes > self._bytes_max:
                return
            waiting.popleft()
            if waiting:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            if not waiter.done():
                self._held[key] = size_bytes
                waiter.set_result(None)


class PromptFetcher:
    """One task for each prompt; `fetched` or `failed` is called unless it is dropped before.

    A prompt has at most `bytes_max` bytes.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        bytes_max: int,
        fetched: Callable[[FetchPrompt, bytes], None],
        failed: Callable[[FetchPrompt, EngineError], None],
    ) -> None:
        self._runtime = runtime
        self._bytes_max = bytes_max
        self._fetched = fetched
        self._failed = failed
        self._tasks: dict[tuple[RequestId, Attempt], asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, wanted: FetchPrompt) -> None:
        task = self._runtime.group.create_task(isolated(self._run, wanted), name="prompt")
        self._tasks[wanted.request_id, wanted.attempt] = task

    def drop(self, dropped: DropPrompt) -> None:
        if (task := self._tasks.pop((dropped.request_id, dropped.attempt), None)) is not None:
            task.cancel()

    async def _run(self, wanted: FetchPrompt) -> None:
        result: bytes | EngineError = Internal("internal error")
        try:
            result = await self._prompt(wanted)
        except EngineError as error:
            fields = {"request_id": wanted.request_id, "code": error.code, "reason": error.message}
            log.warning("prompt not fetched", extra=fields)
            result = error
        finally:
            if self._tasks.pop((wanted.request_id, wanted.attempt), None) is not None:
                if isinstance(result, EngineError):
                    self._failed(wanted, result)
                else:
                    self._fetched(wanted, result)

    async def _prompt(self, wanted: FetchPrompt) -> bytes:
        clock = self._runtime.clock
        until = clock.now() + GATEWAY_LOST_S
        while (left_s := remaining_s(wanted.due_ms, clock)) > 0:
            timeout_s = min(left_s, PROMPT_TRY_S)
            try:
                data = await fetch(wanted.claim, timeout_s=timeout_s, bytes_max=self._bytes_max)
            except BlobUnreachable as error:
                if clock.now() >= until:
                    raise Unavailable(
                        f"the prompt could not be fetched from its gateway: {error.message}; "
                        "workers connect to media.port of gateways",
                        retry_after_s=1.0,
                    ) from error
                await asyncio.sleep(PROMPT_RETRY_S)
            else:
                return bytes(data)
        raise DeadlineExceeded("the prompt was not fetched in time")
