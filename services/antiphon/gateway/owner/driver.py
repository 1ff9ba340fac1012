"""Runs the owner on the bus: feeds it events, executes its actions, keeps its timer."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

from antiphon.bus.transport import BusDown
from antiphon.gateway.owner.actions import Action, Deliver, Ended, TextDelta
from antiphon.service.inbox import UnknownSender
from antiphon.service.peers import Peer, PeerChange
from antiphon.service.tasks import isolated, perform
from antiphon.wire.base import Message, Role, Usage
from antiphon.wire.claim import PromptClaim
from antiphon.wire.errors import (
    DeadlineExceeded,
    EngineError,
    GatewayLost,
    Internal,
    Unavailable,
    WrongTerm,
)
from antiphon.wire.routes import (
    ADOPT,
    CANCEL,
    DETOKENIZER_CONTROL,
    NOTICE,
    OPEN,
    SUBMIT,
    RequestRoute,
)
from antiphon.wire.submit import (
    AdoptRequest,
    CancelRequest,
    FetchOpenList,
    NoticeBatch,
    OpenList,
    OpenListState,
    RequestAdopted,
    SubmitRequest,
    claimed_submit,
)
from antiphon.wire.text import ResumeText, TextBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from antiphon.gateway.media.stored import HeldMedia
    from antiphon.gateway.owner.machine import Owner
    from antiphon.gateway.request_metrics import GatewayMetrics
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName, RequestId
    from antiphon.wire.media import Medium

M = TypeVar("M")
Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 1.0  # timeout of a call; it counts as lost afterwards
_ADOPT_TIMEOUT_S = 5.0
"""How long a request is looked for while no leader knows it: a standby takes over within 3 s."""
_ADOPT_RETRY_S = 0.1
_TIMER_MIN_S = 0.001
"""uvloop's timers have millisecond resolution; one that fires early would fire again at once."""


class OwnerDriver:
    """Delivers events in the task that received them: a token costs no task."""

    def __init__(
        self, owner: Owner, runtime: Runtime, model: ModelName, metrics: GatewayMetrics
    ) -> None:
        self._owner = owner
        self._runtime = runtime
        self._model = model
        self._metrics = metrics
        self._streams: dict[RequestId, RequestStream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_count(self) -> int:
        return self._owner.open_count

    def start(self) -> None:
        self._on_timer()
        self._runtime.peers.watch(self._on_peer_change)
        for peer in self._runtime.peers.all():
            self._on_peer_change(PeerChange.APPEARED, peer)

    def stop(self) -> None:
        """Stop the timer. Events still take effect."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def open(self, stream: RequestStream) -> None:
        self._streams[stream.submit.request_id] = stream
        self._idle.clear()
        self._apply(self._owner.open(stream.submit))

    def mark_consumed(self, stream: RequestStream, delta: TextDelta) -> None:
        self._owner.mark_consumed(stream.submit.request_id, delta.size_bytes)

    def cancel(self, stream: RequestStream, error: EngineError | None = None) -> None:
        """Cancel a request that has not ended: its stream has no reader any more."""
        if stream.ended is None:
            self._apply(self._owner.cancel(stream.submit.request_id, error))

    def cancel_detached(self, request_id: RequestId) -> None:
        """Cancel a request whose client is away, or let go of the output that is kept for it."""
        if (stream := self._streams.get(request_id)) is None or stream.detached:
            self._apply(self._owner.cancel(request_id))

    def find(self, request_id: RequestId) -> SubmitRequest | None:
        """A request of this gateway whose output can be delivered once more."""
        return self._owner.find(request_id)

    def detach(self, stream: RequestStream) -> None:
        """Let a request go on without its reader, which may come back."""
        if stream.ended is None:
            stream.detached = True
            self._apply(self._owner.detach(stream.submit.request_id))

    def resume(
        self, request_id: RequestId, make_stream: Callable[[], RequestStream]
    ) -> RequestStream:
        """Deliver all output of a request of this gateway once more.

        It goes to a stream that takes the place of the request's, or to a new one if that has
        ended.
        """
        if (before := self._streams.get(request_id)) is not None:
            stream = before.replaced(GatewayLost("the stream was resumed by another connection"))
        else:
            stream = make_stream()
        self._streams[request_id] = stream
        self._idle.clear()
        self._apply(self._owner.rewind(request_id))
        return stream

    async def adopt(self, message: AdoptRequest) -> RequestAdopted:
        """Ask the leader for a request of another gateway; it is then to be opened, at once.

        Raises:
            EngineError: The leader refused, or there was none for some time.
        """
        until = self._runtime.clock.now() + _ADOPT_TIMEOUT_S
        with self._owner.adopting(message.request_id):
            while True:
                answer = await self._call(ADOPT, message, model=self._model)
                if not isinstance(answer, EngineError):
                    return answer
                retryable = isinstance(answer, Unavailable | WrongTerm | DeadlineExceeded)
                if not retryable or self._runtime.clock.now() >= until:
                    raise answer
                await asyncio.sleep(_ADOPT_RETRY_S)

    def open_adopted(
        self,
        stream: RequestStream,
        adopted: RequestAdopted,
        client_has: Sequence[tuple[int, int | None]],
    ) -> None:
        request_id = adopted.submit.request_id
        if (stale := self._streams.get(request_id)) is not None:
            stale.put(Ended(Usage(), GatewayLost("the stream was resumed")), stream.received_at)
        self._streams[request_id] = stream
        self._idle.clear()
        self._apply(self._owner.adopt(adopted, client_has))

    def hold_media(self, request_id: RequestId, held: HeldMedia, media: tuple[Medium, ...]) -> None:
        """Own the media of an adopted request, with these claims; unless it has ended."""
        stream = self._streams.get(request_id)
        if stream is None or stream.media is not None:
            held.discard()
            return
        stream.media = held
        self._apply(self._owner.renew_media(request_id, media))

    def lose_media(self, request_id: RequestId, error: EngineError) -> None:
        """Go on without the media of an adopted request; it ends so if they are needed."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.media_error = error

    def streams(self) -> tuple[RequestStream, ...]:
        return tuple(self._streams.values())

    def abort(self, stream: RequestStream) -> None:
        if stream.ended is None:
            self._apply(self._owner.abort(stream.submit.request_id))

    async def idle(self) -> None:
        """Return when no request is open. The caller sets the deadline."""
        await self._idle.wait()

    def close(self, error: EngineError) -> None:
        """End all open requests and publish it. Called after the task group has ended."""
        self.stop()
        for action in self._owner.close(error):
            if isinstance(action, Deliver):
                self._deliver(action)
            elif isinstance(action, OpenList | OpenListState):
                self._announce(action)

    def on_text_batch(self, batch: TextBatch) -> None:
        if not self._runtime.peers.is_alive(batch.detokenizer):
            raise UnknownSender(f"text from {batch.detokenizer.instance}, which is not a live peer")
        self._apply(self._owner.text_arrived(batch))

    def on_open_list_request(self, message: FetchOpenList) -> None:
        self._apply(self._owner.open_list_requested(message))

    def on_notice(self, batch: NoticeBatch) -> None:
        peers, leader = self._runtime.peers, batch.leader.scheduler
        offset_ms = peers.offset_ms(leader)
        if offset_ms is None or peers.is_expired(batch.not_after_unix_ms, leader):
            self._runtime.metrics.late.labels(NOTICE.name).inc()
        else:
            self._apply(self._owner.notice_arrived(batch, offset_ms))

    def _on_peer_change(self, change: PeerChange, peer: Peer) -> None:
        beat = peer.heartbeat
        if beat.role is Role.DETOKENIZER:
            if change is PeerChange.DIED:
                self._apply(self._owner.detokenizer_died(peer.process))
            else:
                self._apply(self._owner.detokenizer_heartbeat(peer.process, beat.streams))
        elif beat.role is Role.SCHEDULER:
            leading = self._runtime.peers.leading(self._model)
            self._apply(self._owner.leader_changed(leading))

    def _apply(self, actions: Iterable[Action]) -> None:
        perform(actions, self._run_action)
        self._update_timer()

    def _run_action(self, action: Action) -> None:
        match action:
            case Deliver():
                self._deliver(action)
            case OpenList() | OpenListState():
                self._announce(action)
            case SubmitRequest():
                self._start(self._submit, action)
            case CancelRequest():
                self._start(self._cancel, action)
            case ResumeText():
                self._start(self._fetch_text, action)

    def _start(self, work: Callable[[M], Coroutine[None, None, None]], message: M) -> None:
        self._runtime.group.create_task(isolated(work, message))

    def _deliver(self, action: Deliver) -> None:
        stream = self._streams[action.request_id]
        now = self._runtime.clock.now()
        if isinstance(action.event, TextDelta) and not stream.resumed:
            if stream.last_token_at is not None:
                self._metrics.latencies.observe_inter_token(stream, now - stream.last_token_at)
            else:
                self._metrics.latencies.observe_ttft(stream, now - stream.received_at)
        stream.put(action.event, now)
        if isinstance(action.event, Ended):
            del self._streams[action.request_id]
            if not self._streams:
                self._idle.set()
            if not stream.counted:
                self._metrics.observe_finished(stream, action.event)

    def _announce(self, message: OpenList | OpenListState) -> None:
        try:
            self._runtime.bus.publish(OPEN, message, model=self._model)
        except BusDown:
            return  # the next state shows that it is missing
        except EngineError as error:
            extra = {"code": error.code, "reason": error.message}
            log.error("open list not sent", extra=extra)  # noqa: TRY400  # no bug of this line

    async def _submit(self, message: SubmitRequest) -> None:
        answer = await self._call(SUBMIT, self._with_claim(message), model=self._model)
        self._apply(self._owner.submit_answered(message.request_id, answer))

    def _with_claim(self, message: SubmitRequest) -> SubmitRequest:
        """The submit as it is sent: a long prompt stays here if every receiver can fetch it.

        This is decided each time, since a process of an earlier version may have joined. A starting
        one is sent nothing yet.
        """
        stream = self._streams.get(message.request_id)
        prompt = None if stream is None else stream.prompt
        if prompt is None or not self._runtime.peers.read_by_all(
            PromptClaim, Role.SCHEDULER, Role.WORKER, started=True
        ):
            return message
        return claimed_submit(message, prompt.claim)

    async def _cancel(self, message: CancelRequest) -> None:
        def note(error: EngineError) -> None:
            extra = {"id": message.request_id, "code": error.code}
            log.info("cancel failed at the leader", extra=extra)

        answer = await self._call(CANCEL, message, note, model=self._model)
        accepted = not isinstance(answer, EngineError)
        self._apply(self._owner.cancel_answered(message.request_id, accepted=accepted))

    async def _fetch_text(self, message: ResumeText) -> None:
        def note(error: EngineError) -> None:
            log.warning("missing text not sent", extra={"code": error.code})

        detokenizer = message.detokenizer
        self._metrics.text_resumes.inc()
        answer = await self._call(
            DETOKENIZER_CONTROL, message, note, detokenizer=detokenizer.instance
        )
        answered = not isinstance(answer, EngineError)
        self._apply(self._owner.text_answered(detokenizer, answered=answered))

    async def _call(
        self,
        route: RequestRoute[Q, R],
        message: Q,
        note: Callable[[EngineError], None] = lambda _: None,
        **address: str,
    ) -> R | EngineError:
        """Return the reply, or the error: the owner has to learn of either.

        `note` logs an error; one that is a bug of ours is logged here, with its traceback.
        """
        try:
            return await self._runtime.bus.call(
                route, message, timeout_s=_CALL_TIMEOUT_S, **address
            )
        except EngineError as error:
            note(error)
            return error
        except Exception:
            request_id = getattr(message, "request_id", None)
            extra = {"route": route.name, "request_id": request_id, **address}
            log.exception("call failed", extra=extra)
            return Internal("internal error")

    def _update_timer(self) -> None:
        if self._timer is not None and self._owner.wake_at() < self._timer_at:
            self._timer.cancel()
            self._start_timer()

    def _on_timer(self) -> None:
        self._metrics.latencies.flush_inter_token()
        actions: Iterable[Action] = ()
        try:
            actions = self._owner.tick()
        except Exception:
            # A tick that failed is not due any more; without a timer it would never run again.
            log.exception("tick failed")
        self._start_timer()
        self._apply(actions)

    def _start_timer(self) -> None:
        # The time is stored here, since uvloop does not report it for short timers.
        self._timer_at = self._owner.wake_at()
        pause_s = max(_TIMER_MIN_S, self._timer_at - self._runtime.clock.now())
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._on_timer)
