"""The owner of requests as a pure state machine: an event in, actions out, the clock passed in.

It submits until a leader accepts the request, delivers each byte of text once and in order,
delivers exactly one terminal event, and publishes the list of open requests. The first proposal to
end a request wins: stop, length, error, deadline, cancel. The owner's own clock enforces the
deadline, with or without the bus.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from antiphon.gateway.owner.actions import Accepted, Action, Deliver, Ended, TextDelta
from antiphon.gateway.owner.request import (
    OpenListBuilder,
    OwnedRequest,
    ResumableRequests,
    StreamGaps,
    is_failure,
)
from antiphon.gateway.owner.timers import Timers
from antiphon.wire.base import Attempt, Process, Term
from antiphon.wire.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    EngineError,
    GatewayLost,
    Internal,
    Overloaded,
    RequestTooLarge,
    Unavailable,
    WorkerLost,
    WrongTerm,
    decode_error,
)
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.submit import (
    CancelRequest,
    FetchOpenList,
    NoticeBatch,
    RequestAdopted,
    SubmitAccepted,
    SubmitRequest,
)
from antiphon.wire.text import ResumeText, TextBatch, TextRow

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from antiphon.config.gateway import GatewayConfig
    from antiphon.service.clock import Clock
    from antiphon.wire.heartbeat import StreamSeq
    from antiphon.wire.media import Medium


log = logging.getLogger(__name__)

_SUBMIT_TIMEOUT_S = 5.0
"""How long a new request waits for a leader: a standby takes over within 3 s."""
_SILENCE_S = 2.0  # how long a running request may make no progress before it is submitted again
_QUEUED_SILENCE_S = 60.0
"""The same for a request without output, which may just be queued. A leader that lacks a request
it had accepted reports so at the next full list, and a new leader is asked at once. With 8 s, 2,000
queued requests caused 250 submits a second."""
_QUEUED_SUBMIT_PAUSE_S = 0.3
"""Least pause between such submits, of all requests: 20,000 queued ones caused 330 a second."""
_SILENCE_MAX_S = 64.0
"""Limit of the doubling pause: 2,000 queued requests would cause a submit every few ms."""
_TOMBSTONE_S = 10.0  # how long past the deadline a cancel is repeated
_PACE_S = 0.001  # pause between submits when all are sent again: a new leader's inbox is bounded
_STALE_LEADER_S = 0.2  # pause after a reply of a leader that has been superseded
_RESUME_WAIT_S = 0.1  # how long requested text may be in flight
_RESUME_RETRY_S = 0.25  # pause after a failed fetch of text
_BURST_READ_S = 5.0
"""How long more unread output that arrives at once than the limit may wait, and the time in which
a client must read as much as the limit."""
_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(slots=True)
class _PendingCancel:
    message: CancelRequest
    until: float
    tries: int = 0


_ListTimer = tuple[Literal["list"]]
_TimerName = Literal["deadline", "submit", "cancel", "unread", "resume"]
_RequestTimer = tuple[_TimerName, RequestId]
_ResumeTimer = tuple[Literal["feed"], Process]
_LIST_TIMER: _ListTimer = ("list",)


class Owner:
    """The open requests of one gateway.

    Each event method returns the actions to execute, in order. `states_read` says whether all that
    follow the open list read `OpenListState`; `list_part_max` requests of it go into a message.
    """

    def __init__(
        self,
        process: Process,
        model: ModelName,
        clock: Clock,
        config: GatewayConfig,
        *,
        list_part_max: int = 4096,
        states_read: Callable[[], bool] = lambda: True,
    ) -> None:
        self._process = process
        self._clock = clock
        self._config = config
        self._requests: dict[RequestId, OwnedRequest] = {}
        self._pending_cancels: dict[RequestId, _PendingCancel] = {}
        self._resumable = ResumableRequests(config.resumable_max, config.resumable_bytes_max)
        self._ended_count = 0  # of those kept after their end
        self._adopting: Counter[RequestId] = Counter()
        self._gaps = StreamGaps(process.instance)
        self._term: Term | None = None
        self._open_list = OpenListBuilder(process, model, clock, config.open_list_s, list_part_max)
        self._timers: Timers[_ListTimer | _RequestTimer | _ResumeTimer] = Timers()
        self._states_read = states_read
        self._timers.set(_LIST_TIMER, clock.now())
        self._actions: list[Action] = []

    @property
    def open_count(self) -> int:
        return len(self._requests) - self._ended_count

    def wake_at(self) -> float:
        at = self._timers.next_at()
        assert at is not None, "the next open list is always due at some time"
        return at

    # Client events.

    def open(self, submit: SubmitRequest) -> list[Action]:
        assert submit.request_id not in self._requests
        request = OwnedRequest(submit, self._clock.now())
        self._own(request)
        # The list goes first: a leader must not run a request that is not on an open list.
        self._announce()
        self._submit(request)
        return self._take_actions()

    @contextmanager
    def adopting(self, request_id: RequestId) -> Generator[None]:
        """While a leader is asked for a request: text of it may arrive before the leader's answer.

        It is requested again until the request is open, or the leader has refused.
        """
        self._adopting[request_id] += 1
        try:
            yield
        finally:
            self._adopting[request_id] -= 1
            if not self._adopting[request_id]:
                del self._adopting[request_id]

    def adopt(
        self, adopted: RequestAdopted, client_has: Sequence[tuple[int, int | None]] = ()
    ) -> list[Action]:
        """Own a request of another gateway. All of its text arrives, from the beginning.

        It may have been one of this gateway before, which does not know yet that it was not. If it
        has been adopted without an answer, its text may have come before, and is fetched.
        `client_has` is how many bytes of the text of each choice, and which token outputs.
        """
        request = OwnedRequest(adopted.submit, self._clock.now())
        if (stale := self._requests.get(request.id)) is not None:
            self._ended_count -= stale.ended
            self._resumable.drop(request.id)
            self._drop_timers(request.id, "unread", "resume")
        request.attempt = adopted.attempt
        request.adopted = request.resumed = True
        request.client_has = tuple(client_has)
        self._own(request)
        self._accept(request, adopted.term)
        for sender in () if adopted.changed else self._gaps.senders():
            self._gaps.record_loss(sender)
            self._resume_if_needed(sender)
        return self._take_actions()

    def find(self, request_id: RequestId) -> SubmitRequest | None:
        """A request of this gateway that has not ended, or whose output is kept."""
        request = self._requests.get(request_id)
        return None if request is None else request.submit

    def renew_media(self, request_id: RequestId, media: tuple[Medium, ...]) -> list[Action]:
        """Submit a request again, whose media are at this gateway now, which has adopted it.

        The leader sends their claims to its worker, and to those that it migrates to.
        """
        request = self._requests.get(request_id)
        if request is not None and not request.ended:
            request.renew_media(media)
            if not request.submitting:
                self._submit(request)
        return self._take_actions()

    def detach(self, request_id: RequestId) -> list[Action]:
        """Go on for a while without a client, which may resume the output."""
        request = self._requests.get(request_id)
        if request is not None and request.has_client and not request.ended:
            request.has_client = False
            self._timers.drop(("unread", request_id))
            self._keep(request)
        return self._take_actions()

    def rewind(self, request_id: RequestId) -> list[Action]:
        """Deliver all output of a request once more: its client resumes it."""
        request = self._requests[request_id]
        self._ended_count -= request.ended
        request.rewind()
        self._resumable.drop(request_id)
        self._timers.drop(("resume", request_id))
        request.last_event_at = self._clock.now()
        self._timers.set(("submit", request_id), request.last_event_at + _SILENCE_S)
        self._timers.set(("deadline", request_id), self._deadline(request))
        if request.detokenizer is not None:
            self._resume_if_needed(request.detokenizer)
        return self._take_actions()

    def mark_consumed(self, request_id: RequestId, size: int) -> None:
        if (request := self._requests.get(request_id)) is not None:
            request.unread.take(size)

    def cancel(self, request_id: RequestId, error: EngineError | None = None) -> list[Action]:
        if (request := self._requests.get(request_id)) is not None:
            self._end_and_cancel(request, error or Cancelled("the client disconnected"))
        return self._take_actions()

    def abort(self, request_id: RequestId) -> list[Action]:
        """Finish each running choice with `abort`, so that the request succeeds."""
        if (request := self._requests.get(request_id)) is not None:
            for event in request.abort():
                self._actions.append(Deliver(request.id, event))
            self._end_and_cancel(request, None)
        return self._take_actions()

    def close(self, error: EngineError) -> list[Action]:
        """End every request, but leave to other gateways those that a client may resume there."""
        for request in list(self._requests.values()):
            if not request.submit.resume_ms:
                self._end_and_cancel(request, error)
            elif not request.ended:
                request.ended = True
                self._actions.append(Deliver(request.id, Ended(request.usage, error)))
        self._announce_whole_or_state()
        return self._take_actions()

    def _own(self, request: OwnedRequest) -> None:
        self._requests[request.id] = request
        self._timers.set(("deadline", request.id), self._deadline(request))
        self._open_list.add(request)

    def _deadline(self, request: OwnedRequest) -> float:
        left_s = (request.submit.deadline_unix_ms - self._clock.unix_ms()) / 1000
        return self._clock.now() + left_s

    # Bus events.

    def submit_answered(
        self, request_id: RequestId, answer: SubmitAccepted | EngineError
    ) -> list[Action]:
        if (request := self._requests.get(request_id)) is not None:
            request.submitting = False
            if isinstance(answer, SubmitAccepted):
                self._accept(request, answer.term)
                if request.renewed:
                    self._submit(request)
            elif _is_retryable(answer, accepted=request.accepted):
                self._retry(request, answer)
            elif isinstance(answer, RequestTooLarge) and request.sealed_to is not None:
                self._end(request, _too_large(answer))
            elif isinstance(answer, DuplicateRequest) and request.submit.resume_ms:
                self._end(request, GatewayLost("the stream was resumed at another gateway"))
            else:
                self._end(request, answer)
        return self._take_actions()

    def cancel_answered(self, request_id: RequestId, *, accepted: bool) -> list[Action]:
        if (cancelling := self._pending_cancels.get(request_id)) is not None:
            at = self._clock.now() + _retry_delay_s(cancelling.tries)
            if accepted or at > cancelling.until:
                del self._pending_cancels[request_id]
            else:
                cancelling.tries += 1
                self._timers.set(("cancel", request_id), at)
        return self._take_actions()

    def text_arrived(self, batch: TextBatch) -> list[Action]:
        if batch.gateway != self._process:
            return []  # for an earlier incarnation
        sender = batch.detokenizer
        self._gaps.on_batch(sender, batch.seq)
        torn = self._gaps.has_gap(sender)
        for row in batch.rows:
            if (request := self._requests.get(row.request_id)) is not None:
                self._apply_row_isolated(request, row, sender)
                torn = torn or request.has_gap
            elif row.request_id in self._adopting:
                self._gaps.record_loss(sender)
                torn = True
        if torn:
            self._resume_if_needed(sender)
        return self._take_actions()

    def text_answered(self, detokenizer: Process, *, answered: bool) -> list[Action]:
        if self._gaps.resuming(detokenizer):
            self._gaps.end_resume(detokenizer, answered=answered)
            pause_s = _RESUME_WAIT_S if answered else _RESUME_RETRY_S
            self._timers.set(("feed", detokenizer), self._clock.now() + pause_s)
        return self._take_actions()

    def detokenizer_heartbeat(
        self, detokenizer: Process, streams: tuple[StreamSeq, ...]
    ) -> list[Action]:
        """Handle a heartbeat, which names the last batch sent to this gateway."""
        self._gaps.on_heartbeat(detokenizer, streams)
        if self._gaps.has_gap(detokenizer):
            self._resume_if_needed(detokenizer)
        return self._take_actions()

    def detokenizer_died(self, detokenizer: Process) -> list[Action]:
        """Expect no more of a dead detokenizer: another one sends its text, as another attempt."""
        self._gaps.forget(detokenizer)
        self._timers.drop(("feed", detokenizer))
        return self._take_actions()

    def notice_arrived(self, batch: NoticeBatch, offset_ms: int = 0) -> list[Action]:
        """End what the leader has given up, unless a later attempt is already followed.

        A request that the leader had accepted and lost is submitted again, and one whose output no
        detokenizer has is sealed and submitted. `offset_ms` converts the
        leader's times to this process's clock.
        """
        stale = self._term is not None and batch.leader < self._term
        if batch.gateway != self._process or stale:
            return []
        if batch.not_after_unix_ms + offset_ms < self._clock.unix_ms():
            return []
        for lost in batch.requests:
            request = self._requests.get(lost.request_id)
            if request is not None and not request.is_past(lost.attempt):
                self._end(request, decode_error(lost.error))
        forgotten = [
            request
            for request_id in batch.lacking
            if (request := self._requests.get(request_id)) is not None
            if request.is_settled and request.term == batch.leader
        ]
        self._submit_soon(forgotten)
        for one in batch.seals:
            if (request := self._requests.get(one.request_id)) is not None:
                self._seal(request, one.attempt)
        return self._take_actions()

    def leader_changed(self, leading: Term | None) -> list[Action]:
        """Handle the current leader term, from the schedulers' heartbeats.

        All requests are submitted to a new leader, which may lack them. Its term may be lower: a
        leader that was partitioned may have missed the other one, and a forged term is followed
        only while it is claimed.
        """
        if leading != self._term:
            self._follow(leading)
        return self._take_actions()

    def tick(self) -> list[Action]:
        now = self._clock.now()
        while (key := self._timers.pop_due(now)) is not None:
            match key:
                case ("list",):
                    self._timers.set(_LIST_TIMER, now + self._config.open_list_s)
                    self._announce_whole_or_state()
                case ("feed", detokenizer):
                    self._fetch_missing_text(detokenizer)
                case ("cancel", request_id):
                    self._actions.append(self._pending_cancels[request_id].message)
                case ("submit", request_id):
                    self._submit_due(self._requests[request_id])
                case ("deadline", request_id):
                    request = self._requests[request_id]
                    self._end_and_cancel(
                        request, DeadlineExceeded("the request's deadline has passed")
                    )
                case ("unread", request_id):
                    self._check_unread(self._requests[request_id])
                case ("resume", request_id):
                    self._let_go(request_id)
        return self._take_actions()

    def open_list_requested(self, message: FetchOpenList) -> list[Action]:
        """Publish the whole list, for all; one that asks again so soon will ask once more."""
        if message.gateway == self._process:
            self._actions += self._open_list.parts()
        return self._take_actions()

    def _follow(self, leading: Term | None) -> None:
        self._term = leading
        if leading is not None:
            self._submit_soon([each for each in self._requests.values() if each.term != leading])

    # Submission.

    def _seal(self, request: OwnedRequest, attempt: Attempt) -> None:
        """Fix the output as it was delivered, and submit it. A leader asks again if it gets none.

        One that has missed a later attempt learns of it by the same submit.
        """
        before = request.attempt
        try:
            request.seal(attempt)
        except WorkerLost as error:
            self._end(request, error)
            return
        if request.attempt != before:
            self._open_list.add(request)
        if not request.submitting:
            self._submit(request)

    def _submit(self, request: OwnedRequest) -> None:
        request.submitting = True
        request.renewed = False
        self._timers.drop(("submit", request.id))
        self._actions.append(request.submission(self._clock.now()))

    def _submit_due(self, request: OwnedRequest) -> None:
        """Submit again: no leader was found, or the request made no progress for long."""
        now = self._clock.now()
        if request.accepted and request.term == self._term and request.tries == 0:
            silence_s = request.silence_s
            if not request.has_output:
                silence_s = max(silence_s, _QUEUED_SUBMIT_PAUSE_S * self.open_count)
            quiet_until = request.last_event_at + silence_s
            if now < quiet_until:
                self._timers.set(("submit", request.id), quiet_until)
                return
            request.silence_s = min(2 * request.silence_s, _SILENCE_MAX_S)
        if not request.submitting:
            self._submit(request)

    def _accept(self, request: OwnedRequest, term: Term) -> None:
        self._mark_accepted(request)
        request.tries = 0
        request.term = term
        if self._term is None:  # a leader is known by its answer before a heartbeat names it
            self._follow(term)
        pause_s = request.silence_s if term == self._term else _STALE_LEADER_S
        self._timers.set(("submit", request.id), self._clock.now() + pause_s)

    def _submit_soon(self, requests: Iterable[OwnedRequest]) -> None:
        """Submit these again one by one, regardless of progress since."""
        for number, request in enumerate(requests):
            request.tries = max(request.tries, 1)
            self._timers.set(("submit", request.id), self._clock.now() + number * _PACE_S)

    def _mark_accepted(self, request: OwnedRequest) -> None:
        """Record that a leader has the request: it replied so, or text arrived."""
        if not request.accepted:
            request.accepted = True
            request.silence_s = _QUEUED_SILENCE_S
            self._actions.append(Deliver(request.id, Accepted()))

    def _retry(self, request: OwnedRequest, error: EngineError) -> None:
        now = self._clock.now()
        # One late failure proves nothing: this process may have been paused while the reply came.
        late = request.tries > 0 and now - request.opened_at >= _SUBMIT_TIMEOUT_S
        if not request.accepted and late:
            # It may still be queued if the reply was lost, so the leader is notified.
            text, after_s = "no scheduler accepted the request", error.retry_after_s or 1.0
            self._end_and_cancel(request, Unavailable(text, retry_after_s=after_s))
            return
        least_s = _SILENCE_S if request.accepted else _retry_delay_s(request.tries)
        pause_s = max(least_s, error.retry_after_s or 0.0)
        request.tries += 1
        self._timers.set(("submit", request.id), now + pause_s)

    # Text.

    def _apply_row_isolated(
        self, request: OwnedRequest, row: TextRow, detokenizer: Process
    ) -> None:
        """Deliver a row. A failure ends only its own request, not those of other rows."""
        try:
            self._apply_row(request, row, detokenizer)
        except Exception:
            log.exception("text row failed", extra={"request_id": request.id})
            if request.id in self._requests:
                self._end_and_cancel(request, Internal("internal error"))

    def _apply_row(self, request: OwnedRequest, row: TextRow, detokenizer: Process) -> None:
        before = request.attempt
        if not request.follow(row, detokenizer):
            return
        if request.attempt != before:
            self._open_list.add(request)
        if request.ended:
            return  # what its client may resume is fetched from where it is then
        request.last_event_at = self._clock.now()
        self._mark_accepted(request)
        if is_failure(row):
            error = decode_error(row.error) if row.error else Internal("the worker gave no reason")
            self._end(request, error)
            return
        try:
            for event in request.apply(row):
                self._actions.append(Deliver(request.id, event))
                if isinstance(event, TextDelta):
                    request.silence_s = _SILENCE_S
                    if request.has_client:
                        request.unread.put(event, resumed=request.resumed)
        except Internal as error:
            self._end_and_cancel(request, error)
            return
        if request.finished and request.submit.resume_ms:
            self._keep_ended(request)
        elif request.finished:
            self._end(request)
        elif request.unread.steady_bytes > self._config.unread_bytes_max:
            self._end_slow_client(request)
        elif request.unread.has_burst and not self._timers.armed(("unread", request.id)):
            self._timers.set(("unread", request.id), self._clock.now() + _BURST_READ_S)

    def _check_unread(self, request: OwnedRequest) -> None:
        if request.unread.is_stalled(self._config.unread_bytes_max):
            self._end_slow_client(request)
        elif request.unread.has_burst:
            self._timers.set(("unread", request.id), self._clock.now() + _BURST_READ_S)

    def _end_slow_client(self, request: OwnedRequest) -> None:
        unread, most = request.unread.size_bytes, self._config.unread_bytes_max
        slow = Cancelled(
            f"the client left {unread} bytes unread; the limit is {most} bytes",
            details={"unread_bytes": str(unread), "bytes_max": str(most)},
        )
        self._end_and_cancel(request, slow)

    def _resume_if_needed(self, detokenizer: Process) -> None:
        key: _ResumeTimer = ("feed", detokenizer)
        if self._gaps.is_dead(detokenizer):
            return  # its requests continue elsewhere, or it is asked when it is back
        if not self._gaps.resuming(detokenizer) and not self._timers.armed(key):
            self._fetch_missing_text(detokenizer)

    def _fetch_missing_text(self, detokenizer: Process) -> None:
        affected = [r for r in self._requests.values() if r.detokenizer == detokenizer]
        if not self._gaps.has_gap(detokenizer) and not any(r.has_gap for r in affected):
            return
        self._gaps.begin_resume(detokenizer)
        message = ResumeText(
            detokenizer=detokenizer,
            gateway=self._process,
            places=tuple(place for request in affected for place in request.resume_offsets()),
        )
        self._actions.append(message)

    # Requests whose output may be resumed.

    def _keep_ended(self, request: OwnedRequest) -> None:
        """Keep a request open after its end: its client may not have received all of it."""
        self._actions.append(Deliver(request.id, Ended(request.usage)))
        request.ended = True
        self._ended_count += 1
        self._drop_timers(request.id, "deadline", "unread")
        if request.is_settled and request.term == self._term:  # else the next leader lacks it
            self._timers.drop(("submit", request.id))
        if request.id not in self._resumable:
            self._keep(request)

    def _keep(self, request: OwnedRequest) -> None:
        self._timers.set(("resume", request.id), self._clock.now() + request.resume_s)
        for request_id in self._resumable.add(request):
            self._let_go(request_id)

    def _let_go(self, request_id: RequestId) -> None:
        request = self._requests[request_id]
        if request.ended:
            self._end(request)
        else:
            self._end_and_cancel(request, Cancelled("the client has not resumed the stream"))

    # Ending.

    def _end_and_cancel(self, request: OwnedRequest, error: EngineError | None) -> None:
        """End a request that may still be running: the leader is asked to cancel it."""
        message = CancelRequest(
            request_id=request.id,
            owner=self._process,
            deadline_unix_ms=request.submit.deadline_unix_ms,
        )
        until = self._deadline(request) + _TOMBSTONE_S
        self._pending_cancels[request.id] = _PendingCancel(message, until)
        self._end(request, error)
        self._actions.append(message)

    def _end(self, request: OwnedRequest, error: EngineError | None = None) -> None:
        """Processes that still work on it see it missing from the open list."""
        del self._requests[request.id]
        self._drop_timers(request.id, "deadline", "submit", "unread", "resume")
        self._resumable.drop(request.id)
        self._open_list.close(request)
        if request.ended:
            self._ended_count -= 1
        else:
            self._actions.append(Deliver(request.id, Ended(request.usage, error)))

    def _drop_timers(self, request_id: RequestId, *names: _TimerName) -> None:
        for name in names:
            self._timers.drop((name, request_id))

    def _announce_whole_or_state(self) -> None:
        self._announce()
        as_state = self._states_read()
        self._actions.append(self._open_list.state() if as_state else self._open_list.whole())

    def _announce(self) -> None:
        self._actions += self._open_list.changes()

    def _take_actions(self) -> list[Action]:
        self._announce()
        actions, self._actions = self._actions, []
        return actions


def _too_large(error: RequestTooLarge) -> WorkerLost:
    """The client's request is not too large: its output is, which was submitted with it."""
    sizes = {name: int(error.details[name]) for name in ("size_bytes", "bytes_max")}
    return WorkerLost.too_large(**sizes)


def _is_retryable(error: EngineError, *, accepted: bool) -> bool:
    if isinstance(error, Overloaded):
        return accepted
    return isinstance(error, DeadlineExceeded | Unavailable | WrongTerm)


def _retry_delay_s(tries: int) -> float:
    return _RETRY_S[min(tries, len(_RETRY_S) - 1)]
