"""The detokenizer's protocol as a pure state machine: messages in, actions out, time passed in.

The ids of a request are fixed here: a row is accepted only at the next offset of the current
attempt, whichever messages were lost, repeated or late. Missing rows are requested again
(`ResendTokens`); unwanted ones are stopped at the worker (`SendStop`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from antiphon.detokenizer.choice import ChoiceResult, ChoiceState, DetokenizerRequest
from antiphon.detokenizer.incremental import Decode, TokenTexts
from antiphon.detokenizer.streams import StreamTable
from antiphon.detokenizer.unfolding import Unfolding
from antiphon.service.followed_lists import OPEN_LIST_READS, OpenLists
from antiphon.service.sequence import SeqSender
from antiphon.wire.base import Attempt, FinishReason, Process
from antiphon.wire.codec import split_rows, unpack_ids
from antiphon.wire.command import ResendTokens, StopChoice, TokenCursor
from antiphon.wire.errors import EngineError, Internal, Overloaded, encode_error
from antiphon.wire.seal import DETAILS_BYTES_MAX, AttemptsSealed, SealedRequest
from antiphon.wire.submit import FetchOpenList
from antiphon.wire.text import ResumeText, TextBatch, TextRow
from antiphon.wire.tokens import TokenColumns, TokenStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from antiphon.wire.ids import InstanceId, RequestId
    from antiphon.wire.seal import SealAttempts, SealRequest
    from antiphon.wire.submit import OpenList, OpenListState
    from antiphon.wire.tokens import TokenNews, TokenRow, TokenStream

log = logging.getLogger(__name__)

READS = (TokenStep.__name__, TokenColumns.__name__, *OPEN_LIST_READS)
"""What a detokenizer's heartbeat announces that it reads."""

RESEND_INTERVAL_S = 0.5
"""Minimum time between two equal messages to a worker that has not reacted."""
FORGET_MS = 10_000
"""How long past its deadline a request is kept for a silent gateway."""
UNLISTED_S = 2.0
"""How long a request may be missing from its gateway's full list before it counts as closed."""
CLOSED_S = 5.0
"""How long a request that can be resumed is kept once its gateway has closed it. Another one may
have adopted it, and the worker that is to send it there may be dead: then only this process has its
output, until the leader seals it."""
SEALS_MAX = 65_536
"""Maximum number of seals that are remembered; the oldest ones are forgotten."""
OWNERS_GONE_MAX = 256
"""Maximum number of dead gateways that are remembered."""
BATCH_BYTES_MAX = 128 * 1024
"""About the largest text batch: a gateway misses far more than one message in an outage."""
_ROW_BYTES = 512  # about the size of a row without its text


@dataclass(frozen=True, slots=True)
class SendStop:
    """Stop a choice at its worker: tokens from an offset on are not wanted."""

    worker: InstanceId
    stop: StopChoice


Action = TextBatch | SendStop | ResendTokens | FetchOpenList


@dataclass(slots=True)
class Reaction:
    """The result of one message: text by gateway, other actions, and whether rows are missing."""

    rows: dict[Process, list[TextRow]] = field(default_factory=dict[Process, list[TextRow]])
    actions: list[Action] = field(default_factory=list[Action])
    missing: bool = False

    def add_rows(self, gateway: Process, rows: Iterable[TextRow]) -> None:
        self.rows.setdefault(gateway, []).extend(rows)


class Detokenizer:
    """All live requests of one detokenizer process.

    `tokens` has the bytes of each token, where the tokenizer defines them; see `TokenTexts`.
    `our_time_ms` converts a time by a process's clock to the local clock.
    """

    def __init__(
        self,
        process: Process,
        decode: Decode,
        requests_max: int,
        tokens: Sequence[bytes] = (),
        our_time_ms: Callable[[int, Process], int] = lambda unix_ms, _: unix_ms,
    ) -> None:
        self.requests: dict[RequestId, DetokenizerRequest] = {}
        self._process = process
        self._decode = decode
        self._tokens = TokenTexts(decode, tokens)
        self._requests_max = requests_max
        self._our_time_ms = our_time_ms
        self._seqs = SeqSender()
        self._unfolding = Unfolding()
        self._streams = StreamTable()
        self._seen: dict[Process, int] = {}  # last seq of each worker incarnation
        self._resend_requested_at: dict[Process, float] = {}
        self._resend_pending: set[Process] = set()  # to be requested after `RESEND_INTERVAL_S`
        self._stopped_at: dict[tuple[RequestId, Attempt, int | None], float] = {}  # by choice
        self._lists = OpenLists()
        self._dead_owners: OrderedDict[Process, None] = OrderedDict()  # dead gateways
        # Up to which attempt a request is sealed. A frozen worker may send its rows much later, and
        # perhaps they would be the first ones of the request here.
        self._sealed: OrderedDict[RequestId, Attempt] = OrderedDict()

    @property
    def live(self) -> int:
        return sum(not request.ended for request in self.requests.values())

    @property
    def sent(self) -> Mapping[InstanceId, int]:
        return {stream.receiver: stream.seq for stream in self._seqs.streams()}

    def on_tokens(self, news: TokenNews, now: float) -> list[Action]:
        """Apply the output of a step. A row that fails ends only its own request."""
        last = self._seen.get(news.worker, 0)
        self._seen[news.worker] = max(news.seq, last)
        if (batch := self._unfolding.batch(news)) is None:
            return self._request_resend(news.worker, now)
        reaction = Reaction(missing=news.seq > last + 1)
        if batch.columns is not None:
            for row in self._streams.rows(batch.worker, batch.columns):
                if row is None:
                    reaction.missing = True  # the row that gave the stream its number was lost
                else:
                    self._apply(row, batch.worker, now, reaction)
        for row in batch.rows:
            self._apply(row, batch.worker, now, reaction)
        if reaction.missing:
            reaction.actions += self._request_resend(batch.worker, now)
        # Stops are sent to the worker before the end is sent to the client: a request that follows
        # the end finds the worker free.
        return [*reaction.actions, *self._batches(reaction)]

    def on_worker_seq(self, worker: Process, seq: int, now: float) -> list[Action]:
        """Compare with the seq in a worker's heartbeat, which shows a lost tail."""
        if seq <= self._seen.get(worker, 0):
            return []
        if requested := self._request_resend(worker, now):
            # Requested once: a worker without anything to send again does not answer.
            self._seen[worker] = seq
        return requested

    def on_open_list(self, message: OpenList | OpenListState, now: float) -> list[Action]:
        """Forget requests that their gateway has ended; stop those that run and are not open."""
        owner = message.owner
        if (change := self._lists.apply(message, now)) is None:
            return []
        self._dead_owners.pop(owner, None)
        for request_id in change.closed:
            request = self.requests.get(request_id)
            if request is None or request.owner != owner:
                continue
            if not request.stream.resume_ms:
                self._forget(request_id)
            elif request.closed_at is None:
                request.closed_at = now
        if change.torn:
            return [FetchOpenList(gateway=owner)]
        if change.lines is None:
            return []
        actions: list[Action] = []
        for request in self._owned(owner):
            if request.request_id in change.lines:
                request.listed_at, request.unowned_at = now, None
            elif request.closed_at is None and now - request.listed_at > (
                CLOSED_S if request.stream.resume_ms else UNLISTED_S
            ):
                actions += self._drop(request)
        return actions

    def on_resume(self, resume: ResumeText) -> tuple[int, list[Action]]:
        """Send a gateway all of its live requests beyond its offsets; count the rows."""
        places = {(p.request_id, p.choice): p for p in resume.places}
        reaction = Reaction()
        for request in self._owned(resume.gateway):
            for index, choice in request.choices.items():
                place = places.get((request.request_id, index))
                start = place.text_offset if place else 0
                token_start = place.token_offset if place else None
                token_start = choice.first if token_start is None else token_start
                # Any other offset is one in another attempt's text, which cannot be continued.
                ids = place.tokens if place else 0
                if choice.can_resume_at(start, token_start, ids):
                    request.origins_sent.pop(index, None)
                    reaction.add_rows(resume.gateway, request.rows(index, start, token_start, ids))
        return sum(map(len, reaction.rows.values())), list(self._batches(reaction))

    def on_seal(self, message: SealAttempts, bytes_max: int) -> AttemptsSealed:
        """Accept nothing more of these attempts, and return what was accepted.

        A reply has at most `bytes_max`, and as many of the requests as fit, at least one. Token
        outputs that do not fit by themselves stay here, for the next attempt.
        """
        sealed: list[SealedRequest] = []
        size_bytes = 0
        for one in message.requests:
            found = self._seal(one, bytes_max)
            size_bytes += _sealed_bytes(found)
            if size_bytes > bytes_max:
                break
            sealed.append(found)
        return AttemptsSealed(detokenizer=self._process, requests=tuple(sealed))

    def _seal(self, one: SealRequest, bytes_max: int) -> SealedRequest:
        request_id, attempt = one.request_id, one.attempt
        request = self.requests.get(request_id)
        if request is not None and request.attempt > attempt:
            return SealedRequest(request_id=request_id, attempt=request.attempt, sealed=False)
        before = self._sealed.pop(request_id, attempt)
        self._sealed[request_id] = max(before, attempt)
        if len(self._sealed) > SEALS_MAX:
            self._sealed.popitem(last=False)
        if request is None or request.lacks_continued:
            return SealedRequest(request_id=request_id)
        details_bytes = request.details_bytes
        with_details = request.stream.details_from is not None and details_bytes <= bytes_max
        sealed = SealedRequest(
            request_id=request_id,
            attempt=request.attempt,
            lineage=request.stream.earlier,
            failed=request.error is not None,
            choices=tuple(
                choice.sealed(index, with_details=with_details)
                for index, choice in request.choices.items()
            ),
        )
        if with_details and _sealed_bytes(sealed) > bytes_max:
            kept = (msgspec.structs.replace(each, details=None) for each in sealed.choices)
            sealed = msgspec.structs.replace(sealed, choices=tuple(kept))
        too_large = details_bytes if details_bytes > DETAILS_BYTES_MAX else None
        if too_large is None and (size_bytes := _sealed_bytes(sealed)) > bytes_max:
            too_large = size_bytes
        if too_large is not None:
            return msgspec.structs.replace(sealed, size_bytes=too_large, choices=())
        return sealed

    def on_tick(self, now: float, unix_ms: int) -> list[Action]:
        """Send pending resend requests, and forget requests long past their deadline."""
        actions: list[Action] = []
        for request in list(self.requests.values()):
            due_ms = self._our_time_ms(request.stream.deadline_unix_ms, request.owner)
            if unix_ms > due_ms + FORGET_MS:
                self._forget(request.request_id)
            elif request.is_abandoned(now) or request.is_closed(now - CLOSED_S):
                actions += self._drop(request)
        self._stopped_at = {
            k: at for k, at in self._stopped_at.items() if now - at < RESEND_INTERVAL_S
        }
        pending = list(self._resend_pending)
        for worker in pending:
            actions += self._request_resend(worker, now)
        return actions

    def on_worker_died(self, worker: Process) -> None:
        self._seen.pop(worker, None)
        self._unfolding.forget(worker)
        self._streams.forget_worker(worker)
        self._resend_requested_at.pop(worker, None)
        self._resend_pending.discard(worker)

    def on_owner_died(self, owner: Process, now: float) -> list[Action]:
        """Forget the requests of a dead gateway, and stop those that still run.

        Those that another gateway may adopt are kept for a while.
        """
        self._lists.forget(owner)
        # Its rows may still be in transit: they must not begin its requests again.
        self._dead_owners[owner] = None
        if len(self._dead_owners) > OWNERS_GONE_MAX:
            self._dead_owners.popitem(last=False)
        actions: list[Action] = []
        for request in self._owned(owner):
            if request.stream.resume_ms:
                request.unowned_at = now
            else:
                actions += self._drop(request)
        return actions

    def _apply(self, row: TokenRow, worker: Process, now: float, reaction: Reaction) -> None:
        try:
            if (request := self._find(row, worker, now, reaction)) is not None:
                self._streams.add(worker, row, request)
                self._accept(request, row, now, reaction)
        except Exception as error:
            extra = {"request_id": row.request_id, "reason": str(error)}
            if isinstance(error, EngineError):
                log.warning("row failed", extra=extra)
            else:
                log.exception("row failed", extra=extra)
            self._fail(row, worker, error, now, reaction)

    def _find(
        self, row: TokenRow, worker: Process, now: float, reaction: Reaction
    ) -> DetokenizerRequest | None:
        """Return the request that a row belongs to; None if the row cannot be used."""
        request = self.requests.get(row.request_id)
        sealed = self._sealed.get(row.request_id)
        if sealed is not None and row.attempt <= sealed:
            reaction.actions += self._stop(row, worker, now)
        elif request is not None and row.attempt <= request.attempt:
            if row.attempt == request.attempt:
                return request
            reaction.actions += self._stop(row, worker, now)
        elif row.stream is None:
            reaction.missing = True  # the row that begins the attempt was lost
        elif row.stream.detokenizer_incarnation not in (None, self._process.incarnation):
            pass  # an earlier process of this name fixes its tokens; its leader binds it anew
        elif row.stream.owner in self._dead_owners and not row.stream.resume_ms:
            pass  # its worker drops it too; if the gateway is only late, it is sent again
        elif request is None and len(self.requests) >= self._requests_max:
            reaction.actions += self._stop(row, worker, now)
            text = "the detokenizer holds as many requests as it may"
            full = Overloaded(text, retry_after_s=1.0)
            reaction.add_rows(row.stream.owner, [_ended(row, full)])
        else:
            return self._begin(row, row.stream, worker, now, reaction)
        return None

    def _begin(
        self,
        row: TokenRow,
        stream: TokenStream,
        worker: Process,
        now: float,
        reaction: Reaction,
    ) -> DetokenizerRequest:
        """Start an attempt. One that continues the output sealed here keeps its ids and text.

        All of that is sent to a gateway that has adopted the request.
        """
        previous = self.requests.get(row.request_id)
        continued = previous is not None and stream.continues == previous.attempt
        if previous is not None and continued and not stream.owner_sealed:
            choices = previous.choices
        else:
            first = stream.details_from or 0
            choices = {
                i: ChoiceState(self._decode, stream.stop, first) for i in range(stream.choices)
            }
        request = DetokenizerRequest(
            row.request_id, stream, row.attempt, worker, choices, self._tokens, listed_at=now
        )
        self.requests[row.request_id] = request
        if stream.owner in self._dead_owners:
            request.unowned_at = now
        if previous is not None and previous.owner != stream.owner:
            for index, choice in choices.items():
                reaction.add_rows(stream.owner, request.rows(index, 0, choice.first, 0))
        return request

    def _accept(
        self, request: DetokenizerRequest, row: TokenRow, now: float, reaction: Reaction
    ) -> None:
        if request.error is not None:
            reaction.actions += self._stop(row, request.worker, now)
            return
        if (choice := request.choices.get(row.choice)) is None:
            raise Internal(f"tokens of choice {row.choice}, which was not asked for")
        if choice.end is not None:
            if row.finish_reason is None:
                reaction.actions += self._stop_choice(request, row.choice, now)
            return
        if row.offset > choice.offset:
            reaction.missing = True
            return
        text_start, token_start = choice.text_bytes, choice.emitted
        if row.weights is not None:
            choice.record_origin(request.worker.instance, row, row.weights)
        choice.accept(row.offset, unpack_ids(row.token_ids), row.details)
        if choice.end is not None:
            reaction.actions += self._stop_choice(request, row.choice, now)
        if row.finish_reason is not None:
            choice.finish(ChoiceResult(row.finish_reason, row.matched_stop, row.error))
        has_outputs = request.stream.details_from is not None and choice.emitted > token_start
        if choice.text_bytes > text_start or has_outputs or choice.end is not None:
            rows = request.rows(row.choice, text_start, token_start, choice.ids_sent)
            reaction.add_rows(request.owner, rows)

    def _fail(
        self, row: TokenRow, worker: Process, error: Exception, now: float, reaction: Reaction
    ) -> None:
        """End the request of a row that could not be applied, and stop it at its worker."""
        public = error if isinstance(error, EngineError) else Internal("internal error")
        request = self.requests.get(row.request_id)
        if request is not None and request.attempt == row.attempt:
            request.error = encode_error(public)
            reaction.add_rows(request.owner, request.rows(row.choice, 0, 0, 0))
        elif row.stream is not None:
            reaction.add_rows(row.stream.owner, [_ended(row, public)])
        reaction.actions += self._stop(row, worker, now)

    def _batches(self, reaction: Reaction) -> Iterator[TextBatch]:
        for gateway, rows in reaction.rows.items():
            for part in split_rows(rows, _row_bytes, BATCH_BYTES_MAX):
                yield TextBatch(
                    detokenizer=self._process,
                    gateway=gateway,
                    seq=self._seqs.next(gateway.instance),
                    rows=tuple(part),
                )

    def _request_resend(self, worker: Process, now: float) -> list[Action]:
        """Request everything beyond the accepted offsets of this worker's requests."""
        if now - self._resend_requested_at.get(worker, -RESEND_INTERVAL_S) < RESEND_INTERVAL_S:
            self._resend_pending.add(worker)
            return []
        self._resend_pending.discard(worker)
        self._resend_requested_at[worker] = now
        places = tuple(
            TokenCursor(request_id=request.request_id, choice=index, offset=choice.offset)
            for request in self.requests.values()
            if request.worker == worker
            for index, choice in request.choices.items()
        )
        return [ResendTokens(worker=worker, detokenizer=self._process, places=places)]

    def _stop_choice(self, request: DetokenizerRequest, index: int, now: float) -> list[Action]:
        """Send the worker the offset at which a choice has ended here."""
        offset = request.choices[index].offset
        return self._stop(request, request.worker, now, choice=index, offset=offset)

    def _stop(
        self, of: TokenRow | DetokenizerRequest, worker: Process, now: float, **at: int
    ) -> list[Action]:
        """Stop an attempt, or one choice at an offset, unless that was just done."""
        key = (of.request_id, of.attempt, at.get("choice"))
        if now - self._stopped_at.get(key, -RESEND_INTERVAL_S) < RESEND_INTERVAL_S:
            return []
        self._stopped_at[key] = now
        return self._send_stop(of, worker, **at)

    def _drop(self, request: DetokenizerRequest) -> list[Action]:
        """Forget a request that its gateway does not want, and stop it if it runs."""
        self._forget(request.request_id)
        return [] if request.ended else self._send_stop(request, request.worker)

    def _forget(self, request_id: RequestId) -> None:
        del self.requests[request_id]
        self._streams.forget(request_id)

    def _send_stop(
        self, of: TokenRow | DetokenizerRequest, worker: Process, **at: int
    ) -> list[Action]:
        stop = StopChoice(
            request_id=of.request_id, attempt=of.attempt, detokenizer=self._process, **at
        )
        return [SendStop(worker.instance, stop)]

    def _owned(self, owner: Process) -> list[DetokenizerRequest]:
        return [request for request in self.requests.values() if request.owner == owner]


def _sealed_bytes(sealed: SealedRequest) -> int:
    """An upper bound."""
    outputs = (
        len(choice.output_ids) + (0 if choice.details is None else choice.details.size_bytes)
        for choice in sealed.choices
    )
    return _ROW_BYTES * (1 + len(sealed.choices)) + sum(outputs)


def _row_bytes(row: TextRow) -> int:
    details = 0 if row.details is None else row.details.size_bytes
    return _ROW_BYTES + len(row.text.encode()) + len(row.ids) + details


def _ended(row: TokenRow, error: EngineError) -> TextRow:
    """The last row of a request that is not held here."""
    return TextRow(
        request_id=row.request_id,
        choice=row.choice,
        attempt=row.attempt,
        text_offset=0,
        finish_reason=FinishReason.ERROR,
        error=encode_error(error),
    )
