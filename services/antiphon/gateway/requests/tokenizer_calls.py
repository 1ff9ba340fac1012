"""Calls of tokenizers: to one after the other, until one replies."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from antiphon.bus.transport import NoResponders
from antiphon.service.clock import remaining_s
from antiphon.service.peers import Liveness, Peer, PeerChange
from antiphon.wire.base import ProcessState, Role
from antiphon.wire.errors import EngineError, Overloaded, Unavailable
from antiphon.wire.routes import CANCEL_ENCODE, DECODE, DECODE_AT, TOKENIZE, TOKENIZE_AT
from antiphon.wire.tokenize import (
    CancelEncode,
    DecodeReply,
    DecodeRequest,
    EncodeReply,
    EncodeRequest,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from antiphon.service.service import Runtime
    from antiphon.wire.ids import InstanceId, ModelName
    from antiphon.wire.routes import RequestRoute

log = logging.getLogger(__name__)

Q = TypeVar("Q", EncodeRequest, DecodeRequest)
R = TypeVar("R", EncodeReply, DecodeReply)

_WAIT_MAX_S = 30.0
_PAUSE_MAX_S = 2.0
LOST_S = 4.0
"""After this time without a reply the call or its reply may be lost, though the tokenizer lives."""

STALE_S = 30.0
"""How long the broker may deliver calls to a dead process: the time to detect its death."""


@dataclass(frozen=True)
class TokenizerRoutes(Generic[Q, R]):
    """A call to the tokenizer `at` which it is directed, or to `any` one."""

    at: RequestRoute[Q, R]
    any: RequestRoute[Q, R]


ENCODES = TokenizerRoutes(TOKENIZE_AT, TOKENIZE)
DECODES = TokenizerRoutes(DECODE_AT, DECODE)


class TokenizerCalls:
    """Calls tokenizers. They are stateless, so repeating a call is harmless.

    Each call is directed to a tokenizer that is alive, and a repeated one to another: the broker
    could deliver both to the same one, which may be frozen.
    """

    def __init__(self, runtime: Runtime, model: ModelName) -> None:
        self._runtime = runtime
        self._model = model
        self._hedge_s = runtime.settings.gateway.encode_hedge_s
        self._lost_calls = LostCalls(runtime)

    async def call(
        self, routes: TokenizerRoutes[Q, R], request: Q, patience_s: float
    ) -> R | EngineError:
        """Call until a tokenizer replies, with increasing pauses.

        Calls again after an error; once in parallel to a slow call, if there is another tokenizer;
        and whenever calls may have been lost: a tokenizer that died took its calls along, and a new
        one is available soon. What a living one has not answered for long is lost or slow: it is
        asked again after twice that time, and so on.
        """
        now = self._runtime.clock.now
        give_up_at, called_at = now() + patience_s, now()
        pause_s, hedged, lost_s = self._hedge_s, False, LOST_S
        called: set[InstanceId | None] = set()
        calls = set[asyncio.Task[R | EngineError]]()
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    living = self._lost_calls.live_count
                    hedges = bool(calls) and not hedged and living > 1
                    silent = bool(calls) and living > 0 and now() - called_at >= lost_s
                    if hedges or silent or not calls or self._lost_calls.may_be_lost(called_at):
                        hedged, called_at = hedged or hedges, now()
                        lost_s *= 2 if silent else 1
                        tokenizer = self._choose(called)
                        called.add(tokenizer)
                        calls.add(group.create_task(self._call_one(routes, request, tokenizer)))
                    done, calls = await asyncio.wait(
                        calls, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    for call in done:
                        outcome = call.result()
                        late = now() >= give_up_at
                        retryable = isinstance(outcome, Unavailable | Overloaded)
                        if not retryable or (late and not calls):
                            return outcome
                    if not calls:
                        await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            finally:
                for call in calls:
                    call.cancel()
                if calls:
                    self._abandon(request)

    def _choose(self, called: Collection[InstanceId | None]) -> InstanceId | None:
        """Choose a tokenizer, if possible one that was not called before; None if none is alive."""
        peers = self._runtime.peers.accepting_work(Role.TOKENIZER)
        ready = [peer.process.instance for peer in peers if peer.heartbeat.model == self._model]
        others = [instance for instance in ready if instance not in called]
        return random.choice(others or ready) if ready else None  # noqa: S311  # spreads load

    async def _call_one(
        self, routes: TokenizerRoutes[Q, R], request: Q, tokenizer: InstanceId | None
    ) -> R | EngineError:
        left_s = min(remaining_s(request.deadline_unix_ms, self._runtime.clock), _WAIT_MAX_S)
        request = msgspec.structs.replace(request, left_ms=round(left_s * 1000))
        call, model = self._runtime.bus.call, self._model
        try:
            if tokenizer is not None:
                try:
                    return await call(
                        routes.at, request, timeout_s=left_s, model=model, tokenizer=tokenizer
                    )
                except NoResponders:
                    pass  # it has just ended, or is of a version up to 0.4
            return await call(routes.any, request, timeout_s=left_s, model=model)
        except EngineError as error:
            return error

    def _abandon(self, request: EncodeRequest | DecodeRequest) -> None:
        if isinstance(request, DecodeRequest):
            return  # takes no time
        try:
            cancel = CancelEncode(request_id=request.request_id)
            self._runtime.bus.publish(CANCEL_ENCODE, cancel, model=self._model)
        except Unavailable as error:  # the text is tokenized in vain, which is harmless
            log.info("tokenizers not reached", extra={"code": error.code})


class LostCalls:
    """Tracks the tokenizers. Any one may have got a call that was not directed, so all count."""

    def __init__(self, runtime: Runtime) -> None:
        self._peers = runtime.peers
        self._clock = runtime.clock
        service, scheduler = runtime.settings.service, runtime.settings.scheduler
        self._silence_s = service.heartbeat_s * scheduler.dead_beats
        self._until = -STALE_S
        self._peers.watch(self._on_peer)

    @property
    def live_count(self) -> int:
        return len(self._peers.accepting_work(Role.TOKENIZER))

    def may_be_lost(self, called_at: float) -> bool:
        """Whether a call sent at `called_at` may have gone to a process that is stale or gone.

        While no process is alive, stale ones may merely be busy and there is no other to call. If
        no process is left at all, the broker reports it.
        """
        if not self.live_count:
            return False
        tokenizers = self._peers.with_role(Role.TOKENIZER)
        silent = any(peer.liveness is not Liveness.ALIVE for peer in tokenizers)
        return silent or called_at <= self._until

    def _on_peer(self, change: PeerChange, peer: Peer) -> None:
        """Record a death. A process that drained has answered its calls."""
        beat = peer.heartbeat
        if change is not PeerChange.DIED or beat.role != Role.TOKENIZER:
            return
        if beat.state is ProcessState.DRAINING:
            return
        # The previous incarnation of a restarted process lost its calls and receives no more.
        came_back = self._peers.age_s(peer) < self._silence_s
        self._until = max(self._until, self._clock.now() + (0.0 if came_back else STALE_S))
