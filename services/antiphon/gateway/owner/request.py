"""Open requests as their owner sees them: their attempts, their text and its gaps, their list."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.service.followed_lists import ListUpdate, PublishedList, open_content
from antiphon.service.sequence import Arrival, SeqReceiver
from antiphon.wire.base import Attempt, FinishReason, Process, Term, Usage
from antiphon.wire.codec import ID_BYTES, id_count
from antiphon.wire.command import ChoiceOutput
from antiphon.wire.errors import Internal, WorkerLost
from antiphon.wire.seal import DETAILS_BYTES_MAX
from antiphon.wire.submit import (
    OpenList,
    OpenListState,
    OpenRequest,
    OwnerSeal,
    SubmitRequest,
)
from antiphon.wire.text import ChoiceCursor, Origin, TextRow
from antiphon.wire.token_outputs import TokenOutputsBuffer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from antiphon.service.clock import Clock
    from antiphon.wire.heartbeat import StreamSeq
    from antiphon.wire.ids import InstanceId, ModelName, RequestId
    from antiphon.wire.media import Medium
    from antiphon.wire.token_outputs import TokenOutputsChunk


_REQUEST_BYTES = 4 * 1024  # about the size of a request without its prompt
_DEAD_MAX = 256  # dead detokenizers that are remembered
_LISTS_VALID = 3  # a list this many intervals old is no longer valid


class OwnedChoice:
    """Delivery state of one choice: places text by byte offset, token outputs and ids by token.

    Attributes:
        ids: The output ids, which determine at least the text delivered: int32, little-endian.
        has_all_ids: Whether detokenizers have sent them; those up to version 0.4 do not.
        outputs: The token outputs delivered, if any were requested.
    """

    def __init__(self, first_token: int = 0) -> None:
        self.bytes_shown = 0
        self.tokens_shown = first_token
        self.finished = False
        self.tokens = self.reasoning_tokens = 0
        self.origins: tuple[Origin, ...] = ()
        self.ids = bytearray()
        self.has_all_ids = True
        self.outputs = TokenOutputsBuffer(first_token)
        self._ids_known = 0
        self._finish: Finished | None = None
        self._first_token = first_token
        self._bytes_known = 0
        self._tokens_known = first_token

    def rewind(self) -> None:
        """Deliver everything once more, from the beginning."""
        if self.started:  # what is known to exist shows as a gap, so that it is fetched
            self._bytes_known = max(self._bytes_known, self.bytes_shown, 1)
        self.bytes_shown, self.tokens_shown = 0, self._first_token
        self.finished = False

    @property
    def id_count(self) -> int:
        return len(self.ids) // ID_BYTES

    @property
    def size_bytes(self) -> int:
        """Of the output that is kept."""
        return len(self.ids) + self.outputs.size_bytes

    @property
    def started(self) -> bool:
        return bool(self.bytes_shown) or self.finished or self.tokens_shown > self._first_token

    @property
    def has_gap(self) -> bool:
        """Whether output beyond a gap has arrived."""
        beyond = self._bytes_known > self.bytes_shown or self._tokens_known > self.tokens_shown
        return (beyond or self._ids_known > self.id_count) and not self.finished

    def reset_gaps(self) -> None:
        """Forget output beyond a gap, which was of another attempt."""
        self._bytes_known, self._tokens_known = self.bytes_shown, self.tokens_shown
        self._ids_known = self.id_count

    def drop_unreported_ids(self) -> None:
        """Drop ids whose token outputs are not here: they are beyond those that determine the text.

        The next attempt may have others in their place.
        """
        del self.ids[ID_BYTES * max(0, self.outputs.end) :]
        self._ids_known = self.id_count

    def restart(self) -> None:
        """Forget the ids of an attempt that is not continued; nothing of it was delivered."""
        self.ids.clear()
        self.outputs = TokenOutputsBuffer(self._first_token)

    def is_contiguous(self, row: TextRow) -> bool:
        token_offset = self.tokens_shown if row.details is None else row.details.offset
        self._bytes_known = max(self._bytes_known, row.text_offset)
        self._tokens_known = max(self._tokens_known, token_offset)
        id_start = row.tokens - id_count(row.ids)
        self._ids_known = max(self._ids_known, id_start)
        return (
            row.text_offset <= self.bytes_shown
            and token_offset <= self.tokens_shown
            and id_start <= self.id_count
        )

    def append_ids(self, row: TextRow) -> None:
        if row.text or row.tokens:
            self.has_all_ids = row.tokens > 0
        if (more := row.tokens - self.id_count) > 0:
            self.ids += row.ids[-more * ID_BYTES :]

    def append_text(self, offset: int, text: str) -> str:
        """Return the new part of `text`, which must join the delivered text."""
        if offset < self.bytes_shown:
            text = _cut(text, self.bytes_shown - offset)
        self.bytes_shown += len(text) if text.isascii() else len(text.encode())
        return text

    def append_outputs(self, piece: TokenOutputsChunk | None) -> TokenOutputsChunk | None:
        if piece is None or piece.end <= self.tokens_shown:
            return None
        piece = piece.beyond(self.tokens_shown)
        self.tokens_shown = piece.end
        if piece.end > self.outputs.end:  # not so if it is delivered once more
            self.outputs.append(piece.beyond(self.outputs.end).details)
        return piece

    def finish(self, row: TextRow, reason: FinishReason) -> Finished:
        self.finished = True
        self._finish = Finished(
            row.choice, reason, row.matched_stop, self.bytes_shown, self.origins
        )
        return self._finish

    def sealed(self, index: int, *, with_outputs: bool) -> ChoiceOutput:
        """What was delivered, for an attempt that continues from there."""
        finish, outputs = self._finish, None
        matched = None if finish is None else finish.matched_stop
        if with_outputs:
            outputs = self.outputs.read(self._first_token, self.outputs.end)
        return ChoiceOutput(
            choice=index,
            output_ids=bytes(self.ids),
            details=outputs,
            finish_reason=None if finish is None else finish.reason,
            matched_stop=None if isinstance(matched, str) else matched,
        )


class ResumableRequests:
    """Requests that are kept for a client that may resume them, within bounds. Pure."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._sizes: OrderedDict[RequestId, int] = OrderedDict()

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._sizes

    def add(self, request: OwnedRequest) -> list[RequestId]:
        """Keep a request; return those that no longer fit, the oldest first."""
        self.drop(request.id)
        self._sizes[request.id] = size = request.size_bytes
        self._bytes += size
        excess: list[RequestId] = []
        while len(self._sizes) > self._count_max or self._bytes > self._bytes_max:
            oldest, size = self._sizes.popitem(last=False)
            self._bytes -= size
            excess.append(oldest)
        return excess

    def drop(self, request_id: RequestId) -> None:
        self._bytes -= self._sizes.pop(request_id, 0)


class OwnedRequest:
    """Follows one attempt at a time and never mixes two. Pure.

    Attributes:
        has_client: Whether a client reads its output, or waits for it.
        ended: Its output is complete, and is kept for a client that resumes it.
        adopted: Its client has output of another gateway.
        client_has: What the client of an adopted request has of each choice: bytes of its text, and
            token outputs up to an offset.
        resumed: Its output is delivered from the beginning to a client that has some of it.
        renewed: Its media have other claims than in the last submit.
    """

    def __init__(self, submit: SubmitRequest, now: float) -> None:
        self.submit = submit
        self.opened_at = now
        self.last_event_at = now
        self.attempt: Attempt | None = None  # the attempt that is followed
        self.earlier: tuple[Attempt, ...] = ()  # those that it continues, the first one first
        self.sealed_to: Attempt | None = None  # no text is accepted up to this attempt
        self.detokenizer: Process | None = None  # incarnation that sends it
        self.accepted = False  # a leader has, or had, the request
        self.term: Term | None = None  # of the leader that accepted it last
        self.submitting = False  # a submit is in flight
        self.renewed = False
        self.tries = 0  # consecutive submits that found no leader
        self.silence_s = 0.0  # without progress for so long, it is submitted again
        self.usage = Usage()
        self.unread = UnreadBytes()
        self.has_client = True
        self.ended = False
        self.adopted = self.resumed = False
        self.client_has: tuple[tuple[int, int | None], ...] = ()
        self._delivered_before = False  # what was delivered is delivered once more
        self._details_from = submit.sampling.details_from(id_count(submit.prompt_ids))
        self._choices = [OwnedChoice(self._details_from or 0) for _ in range(submit.choices)]

    @property
    def id(self) -> RequestId:
        return self.submit.request_id

    @property
    def has_output(self) -> bool:
        """Whether a client has some of its output, of this gateway or of another one."""
        before = self.adopted or self._delivered_before
        return before or any(choice.started for choice in self._choices)

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    @property
    def is_settled(self) -> bool:
        """Whether a leader has the request as far as known, and no submit is due or in flight."""
        return self.accepted and not self.submitting and not self.tries

    @property
    def size_bytes(self) -> int:
        """About what it takes here, besides unread output."""
        submit = self.submit
        outputs = sum(choice.size_bytes for choice in self._choices)
        return _REQUEST_BYTES + len(submit.prompt_ids) + len(submit.block_digests) + outputs

    @property
    def has_gap(self) -> bool:
        return any(choice.has_gap for choice in self._choices)

    @property
    def resume_s(self) -> float:
        """How long it is kept without a client, or after its end."""
        return self.submit.resume_ms / 1000

    def rewind(self) -> None:
        """Deliver all output once more, to a client that resumes it."""
        if not self._lacks_client_output:
            self.client_has = ()
        self._delivered_before = self.has_output
        self.unread = UnreadBytes()
        self.has_client, self.ended, self.resumed = True, False, True
        for choice in self._choices:
            choice.rewind()

    def renew_media(self, media: tuple[Medium, ...]) -> None:
        self.submit = msgspec.structs.replace(self.submit, media=media)
        self.renewed = True

    def submission(self, now: float) -> SubmitRequest:
        """The submit to send now; a repeated one names the delivered attempt."""
        return msgspec.structs.replace(
            self.submit,
            attempt_floor=self.attempt if self.has_output else None,
            sealed=self._sealed(),
            waited_ms=round((now - self.opened_at) * 1000),
        )

    def open_list_entry(self) -> OpenRequest:
        return OpenRequest(
            request_id=self.id,
            deadline_unix_ms=self.submit.deadline_unix_ms,
            attempt=self.attempt,
        )

    def resume_offsets(self) -> Iterator[ChoiceCursor]:
        for index, choice in enumerate(self._choices):
            yield ChoiceCursor(
                request_id=self.id,
                choice=index,
                text_offset=choice.bytes_shown,
                token_offset=None if self._details_from is None else choice.tokens_shown,
                tokens=choice.id_count,
            )

    def is_past(self, attempt: Attempt | None) -> bool:
        """Whether a later attempt than this is followed; any attempt is later than none."""
        return self.attempt is not None and (attempt is None or self.attempt > attempt)

    def follow(self, row: TextRow, detokenizer: Process) -> bool:
        """Decide whether to deliver a row's attempt, switching to it if allowed.

        A higher attempt is followed if it continues the current one, directly or by others between,
        or if nothing was delivered. One that was sealed is not.
        """
        if self.sealed_to is not None and row.attempt <= self.sealed_to:
            return False
        if row.attempt == self.attempt:
            # A new incarnation of the detokenizer lacks choices that the worker finished before.
            return detokenizer == self.detokenizer
        if self.attempt is not None:
            if row.attempt < self.attempt:
                return False
            if self.attempt not in (row.continues, *row.lineage):
                if self.has_output:
                    return False
                for choice in self._choices:
                    choice.restart()
        self.attempt = row.attempt
        self.earlier = row.lineage if row.continues is None else (*row.lineage, row.continues)
        self.detokenizer = detokenizer
        for choice in self._choices:
            choice.reset_gaps()
        return True

    def seal(self, attempt: Attempt) -> bool:
        """Accept no more text up to this attempt; False if a later one is followed.

        Without output it follows none from then on, and begins again with the next one.

        Raises:
            WorkerLost: Its output is not here as ids, or less of it than its client has, or there
                are too many token outputs.
        """
        if self.is_past(attempt):
            return False
        self.sealed_to = attempt if self.sealed_to is None else max(attempt, self.sealed_to)
        outputs = sum(choice.outputs.size_bytes for choice in self._choices)
        if not all(choice.has_all_ids for choice in self._choices):
            raise WorkerLost("a detokenizer of an earlier version had the output and is lost")
        if self._lacks_client_output:
            raise WorkerLost("the output that the client has read is lost")
        if outputs > DETAILS_BYTES_MAX:
            raise WorkerLost.too_large(size_bytes=outputs, bytes_max=DETAILS_BYTES_MAX)
        if not self.has_output:
            self.attempt, self.earlier = None, ()
            for choice in self._choices:
                choice.restart()
                choice.reset_gaps()
        elif self._details_from is not None:
            for choice in self._choices:
                choice.drop_unreported_ids()
        return True

    @property
    def _lacks_client_output(self) -> bool:
        return any(
            choice.bytes_shown < text or choice.tokens_shown < (tokens or 0)
            for choice, (text, tokens) in zip(self._choices, self.client_has, strict=False)
        )

    def _sealed(self) -> OwnerSeal | None:
        """What was sealed, until a later attempt is followed."""
        if self.sealed_to is None or self.is_past(self.sealed_to):
            return None
        if self.attempt is None or not self.has_output:
            return OwnerSeal(sealed_to=self.sealed_to)
        with_outputs = self._details_from is not None
        return OwnerSeal(
            sealed_to=self.sealed_to,
            attempts=(*self.earlier, self.attempt),
            choices=tuple(
                choice.sealed(index, with_outputs=with_outputs)
                for index, choice in enumerate(self._choices)
            ),
        )

    def apply(self, row: TextRow) -> Iterator[TextDelta | Finished]:
        if not 0 <= row.choice < len(self._choices):
            raise Internal(f"text of choice {row.choice}, which was not requested")
        choice = self._choices[row.choice]
        if choice.finished:
            return
        if not choice.is_contiguous(row):
            return
        offset = choice.bytes_shown  # offset of the new text, whatever was repeated before it
        choice.append_ids(row)
        text = choice.append_text(row.text_offset, row.text)
        details = choice.append_outputs(row.details)
        if row.usage is not None:
            choice.tokens, choice.reasoning_tokens = row.tokens, row.reasoning_tokens
            self.usage = self._usage(row.usage)
        choice.origins = row.origins or choice.origins
        if text or details:
            usage = None if row.usage is None else self.usage
            yield TextDelta(row.choice, offset, text, usage, details, choice.origins)
        if row.finish_reason is not None:
            yield choice.finish(row, row.finish_reason)

    def _usage(self, known: Usage) -> Usage:
        """The counts of all choices: the detokenizer of a row may not know those of others yet."""
        tokens = sum(choice.tokens for choice in self._choices)
        if not tokens:
            return known
        reasoning = sum(choice.reasoning_tokens for choice in self._choices)
        return msgspec.structs.replace(known, completion_tokens=tokens, reasoning_tokens=reasoning)

    def abort(self) -> Iterator[Finished]:
        for index, choice in enumerate(self._choices):
            if not choice.finished:
                choice.finished = True
                reason = FinishReason.ABORT
                yield Finished(index, reason, None, choice.bytes_shown, choice.origins)


@dataclass(slots=True)
class UnreadBytes:
    """Bytes of text and token outputs. Pure.

    Text arrives as it is generated, so a client with more than the limit unread is not reading.
    Token outputs of a prompt, and all output of a stream that is resumed, arrive at once, faster
    than any client reads: for them it has some seconds, extended as long as it keeps reading.
    """

    size_bytes: int = 0
    _burst_bytes: int = 0
    _taken_bytes: int = 0

    @property
    def steady_bytes(self) -> int:
        """Unread bytes of what arrives as it is generated."""
        return self.size_bytes - self._burst_bytes

    @property
    def has_burst(self) -> bool:
        return self._burst_bytes > 0

    def put(self, delta: TextDelta, *, resumed: bool) -> None:
        self.size_bytes += delta.size_bytes
        if resumed or (delta.details is not None and delta.details.offset < 0):
            self._burst_bytes += delta.size_bytes

    def take(self, size_bytes: int) -> None:
        """The client has read this many bytes, those that came at once first."""
        self.size_bytes -= size_bytes
        self._burst_bytes = max(0, self._burst_bytes - size_bytes)
        self._taken_bytes += size_bytes

    def is_stalled(self, bytes_max: int) -> bool:
        """Whether more than the limit is unread and no more than it was read since last checked."""
        taken, self._taken_bytes = self._taken_bytes, 0
        return self.size_bytes > bytes_max and taken <= bytes_max


class OpenListBuilder:
    """Makes the messages of this gateway's open list. Pure."""

    def __init__(
        self, owner: Process, model: ModelName, clock: Clock, interval_s: float, part_max: int
    ) -> None:
        self._owner = owner
        self._model = model
        self._clock = clock
        self._valid_ms = int(_LISTS_VALID * interval_s * 1000)
        self._list = PublishedList(open_content, part_max)

    def add(self, request: OwnedRequest) -> None:
        """Add a request that is new, or that follows another attempt."""
        self._list.put(request.open_list_entry())

    def close(self, request: OwnedRequest) -> None:
        self._list.remove(request.id)

    def changes(self) -> list[OpenList]:
        return [self._message(update) for update in self._list.changes()]

    def whole(self) -> OpenList:
        """Return all open requests in one message; includes all changes so far."""
        return self._message(self._list.whole())

    def parts(self) -> list[OpenList | OpenListState]:
        """Return all open requests in messages of bounded size; none if that was done just now."""
        parts = [self._message(update) for update in self._list.parts(self._clock.now())]
        return [*parts, self.state()] if parts else []

    def state(self) -> OpenListState:
        """Return the number and digest of the requests as of all changes that were published."""
        assert self._list.is_published, "changes are to be published first"
        return OpenListState(
            model=self._model,
            owner=self._owner,
            version=self._list.version,
            count=len(self._list.lines),
            digest=self._list.digest,
            not_after_unix_ms=self._clock.unix_ms() + self._valid_ms,
        )

    def _message(self, update: ListUpdate[OpenRequest]) -> OpenList:
        return OpenList(
            model=self._model,
            owner=self._owner,
            version=update.version,
            whole=update.whole,
            opened=update.opened,
            closed=update.closed,
            not_after_unix_ms=self._clock.unix_ms() + self._valid_ms,
            parts=update.parts,
        )


class StreamGaps:
    """Missing text of detokenizers, by sequence numbers, until it has been fetched. Pure."""

    def __init__(self, receiver: InstanceId) -> None:
        self._receiver = receiver
        self._seqs = SeqReceiver()
        self._incomplete: set[Process] = set()
        self._resuming: set[Process] = set()
        self._dead: OrderedDict[Process, None] = OrderedDict()

    def senders(self) -> list[Process]:
        """All of which a batch has arrived."""
        return self._seqs.senders()

    def has_gap(self, sender: Process) -> bool:
        return sender in self._incomplete

    def resuming(self, sender: Process) -> bool:
        return sender in self._resuming

    def is_dead(self, sender: Process) -> bool:
        return sender in self._dead

    def on_batch(self, sender: Process, seq: int) -> None:
        """Record a batch. A late or repeated one is no loss: text is placed by offset."""
        if self._seqs.accept(sender, seq) is Arrival.GAP:
            self._incomplete.add(sender)

    def on_heartbeat(self, sender: Process, streams: Iterable[StreamSeq]) -> None:
        """Record the sent count of a heartbeat: the loss of the last batch shows only there."""
        if sender in self._dead:  # it only seemed so; what it has sent since was not accepted
            del self._dead[sender]
            self._incomplete.add(sender)
        if self._seqs.tail_lost(sender, self._receiver, streams):
            self._incomplete.add(sender)

    def record_loss(self, sender: Process) -> None:
        self._incomplete.add(sender)

    def begin_resume(self, sender: Process) -> None:
        self._incomplete.discard(sender)
        self._resuming.add(sender)

    def end_resume(self, sender: Process, *, answered: bool) -> None:
        """Record the outcome of a fetch; after a failure the loss remains."""
        self._resuming.discard(sender)
        if not answered:
            self._incomplete.add(sender)

    def forget(self, sender: Process) -> None:
        self._seqs.forget(sender)
        self._incomplete.discard(sender)
        self._resuming.discard(sender)
        self._dead[sender] = None
        if len(self._dead) > _DEAD_MAX:
            self._dead.popitem(last=False)


def is_failure(row: TextRow) -> bool:
    """Whether a row ends its request with an error, whatever text came before."""
    return row.error is not None or row.finish_reason is FinishReason.ERROR


def _cut(text: str, size: int) -> str:
    """Drop the first `size` UTF-8 bytes."""
    if text.isascii():
        return text[size:]
    try:
        return text.encode()[size:].decode()
    except UnicodeDecodeError as error:
        raise Internal("text does not join what was delivered before") from error
