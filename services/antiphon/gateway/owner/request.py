"""One open request as its owner sees it: which attempt it follows, and what text it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.gateway.owner.unread_bytes import UnreadBytes
from antiphon.wire.base import FinishReason, Usage
from antiphon.wire.codec import id_count
from antiphon.wire.errors import Internal
from antiphon.wire.submit import OpenRequest
from antiphon.wire.text import ChoiceCursor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.wire.base import Attempt, Process, Term
    from antiphon.wire.ids import RequestId
    from antiphon.wire.submit import SubmitRequest
    from antiphon.wire.text import Origin, TextRow
    from antiphon.wire.token_outputs import TokenOutputsChunk


class OwnedChoice:
    """How much of one choice has been shown; places text by its byte offset, details by token."""

    def __init__(self, first_token: int = 0) -> None:
        self.bytes_shown = 0
        self.tokens_shown = first_token
        self.finished = False
        self.origins: tuple[Origin, ...] = ()
        self._first_token = first_token
        self._bytes_known = 0
        self._tokens_known = first_token

    @property
    def started(self) -> bool:
        """Whether the client has seen anything of it."""
        return bool(self.bytes_shown) or self.finished or self.tokens_shown > self._first_token

    @property
    def has_gap(self) -> bool:
        """Whether something beyond a hole has been seen."""
        beyond = self._bytes_known > self.bytes_shown or self._tokens_known > self.tokens_shown
        return beyond and not self.finished

    def reset_gaps(self) -> None:
        """What was seen beyond a hole was another attempt's."""
        self._bytes_known, self._tokens_known = self.bytes_shown, self.tokens_shown

    def is_contiguous(self, row: TextRow) -> bool:
        """Whether nothing is missing before a row."""
        token_offset = self.tokens_shown if row.details is None else row.details.offset
        self._bytes_known = max(self._bytes_known, row.text_offset)
        self._tokens_known = max(self._tokens_known, token_offset)
        return row.text_offset <= self.bytes_shown and token_offset <= self.tokens_shown

    def append_text(self, offset: int, text: str) -> str:
        """Return what is new in `text`, which joins what was shown.

        Raises:
            Internal: It does not after all: two generations were mixed.
        """
        if offset < self.bytes_shown:
            text = _cut(text, self.bytes_shown - offset)
        self.bytes_shown += len(text) if text.isascii() else len(text.encode())
        return text

    def append_outputs(self, piece: TokenOutputsChunk | None) -> TokenOutputsChunk | None:
        """Return what is new in a piece that joins what was shown, if anything is."""
        if piece is None or piece.end <= self.tokens_shown:
            return None
        piece = piece.beyond(self.tokens_shown)
        self.tokens_shown = piece.end
        return piece


class OwnedRequest:
    """Follows one attempt at a time and never splices two generations. Pure.

    Attributes:
        attempt: The attempt whose text is followed, if any has come.
        detokenizer: The life of the detokenizer that says it.
        accepted: Whether a leader has, or had, the request.
        term: The leader that accepted it last.
        asking: Whether a submit is under way.
        tries: Submits in a row that found no leader.
        quiet_s: How long nothing may be heard before the leader is asked again.
        unread: What its client has not taken.
    """

    def __init__(self, submit: SubmitRequest, now: float) -> None:
        self.submit = submit
        self.opened_at = now
        self.last_event_at = now
        self.attempt: Attempt | None = None
        self.detokenizer: Process | None = None
        self.accepted = False
        self.term: Term | None = None
        self.submitting = False
        self.tries = 0
        self.silence_s = 0.0
        self.usage = Usage()
        self.unread = UnreadBytes()
        self._details_from = submit.sampling.details_from(id_count(submit.prompt_ids))
        self._choices = [OwnedChoice(self._details_from or 0) for _ in range(submit.choices)]

    @property
    def id(self) -> RequestId:
        """The request's name in the cluster."""
        return self.submit.request_id

    @property
    def has_output(self) -> bool:
        """Whether the client has seen anything of the followed attempt."""
        return any(choice.started for choice in self._choices)

    @property
    def finished(self) -> bool:
        """Whether every choice is complete."""
        return all(choice.finished for choice in self._choices)

    @property
    def is_settled(self) -> bool:
        """Whether a leader has it, for all that we know, and no submit is due or under way."""
        return self.accepted and not self.submitting and not self.tries

    @property
    def has_gap(self) -> bool:
        """Whether something was said beyond a hole."""
        return any(choice.has_gap for choice in self._choices)

    def submission(self, now: float) -> SubmitRequest:
        """The submit to send now: one that is sent again names the attempt that was shown."""
        return msgspec.structs.replace(
            self.submit,
            attempt_floor=self.attempt if self.has_output else None,
            waited_ms=round((now - self.opened_at) * 1000),
        )

    def open_list_entry(self) -> OpenRequest:
        """This request's line of an open list, as things stand."""
        return OpenRequest(
            request_id=self.id,
            deadline_unix_ms=self.submit.deadline_unix_ms,
            attempt=self.attempt,
        )

    def resume_offsets(self) -> Iterator[ChoiceCursor]:
        """How much of each choice has been shown, for the detokenizer to go on from."""
        for index, choice in enumerate(self._choices):
            yield ChoiceCursor(
                request_id=self.id,
                choice=index,
                text_offset=choice.bytes_shown,
                token_offset=None if self._details_from is None else choice.tokens_shown,
            )

    def is_past(self, attempt: Attempt | None) -> bool:
        """Whether a later attempt than this one is followed; every one is later than none."""
        return self.attempt is not None and (attempt is None or self.attempt > attempt)

    def follow(self, row: TextRow, detokenizer: Process) -> bool:
        """Decide whether a row's attempt is the one to show, moving on to it where it may be.

        A higher attempt is followed if it continues the followed one, or if nothing was shown.
        """
        if row.attempt == self.attempt:
            # The next life of its detokenizer lacks what the last one has ended at the worker.
            return detokenizer == self.detokenizer
        if self.attempt is not None:
            if row.attempt < self.attempt:
                return False
            if self.has_output and row.continues != self.attempt:
                return False
        self.attempt = row.attempt
        self.detokenizer = detokenizer
        for choice in self._choices:
            choice.reset_gaps()
        return True

    def apply(self, row: TextRow) -> Iterator[TextDelta | Finished]:
        """Place one row of the followed attempt and yield what the client may see of it.

        Raises:
            Internal: The row does not fit the request.
        """
        if not 0 <= row.choice < len(self._choices):
            raise Internal(f"text of choice {row.choice}, which was not asked for")
        choice = self._choices[row.choice]
        if choice.finished:
            return
        if not choice.is_contiguous(row):
            return
        offset = choice.bytes_shown  # where what is new begins, whatever was said again before it
        text = choice.append_text(row.text_offset, row.text)
        details = choice.append_outputs(row.details)
        if row.usage is not None:
            self.usage = row.usage
        choice.origins = row.origins or choice.origins
        if text or details:
            yield TextDelta(row.choice, offset, text, row.usage, details, choice.origins)
        if row.finish_reason is not None:
            choice.finished = True
            yield Finished(
                row.choice,
                row.finish_reason,
                row.matched_stop,
                choice.bytes_shown,
                choice.origins,
            )

    def abort(self) -> Iterator[Finished]:
        """Finish each choice that goes on."""
        for index, choice in enumerate(self._choices):
            if not choice.finished:
                choice.finished = True
                reason = FinishReason.ABORT
                yield Finished(index, reason, None, choice.bytes_shown, choice.origins)


def is_failure(row: TextRow) -> bool:
    """Whether a row ends its request with an error, whatever text came before it."""
    return row.error is not None or row.finish_reason is FinishReason.ERROR


def _cut(text: str, size: int) -> str:
    """Drop the first `size` UTF-8 bytes."""
    if text.isascii():
        return text[size:]
    try:
        return text.encode()[size:].decode()
    except UnicodeDecodeError as error:
        raise Internal("text does not join what was shown before") from error
