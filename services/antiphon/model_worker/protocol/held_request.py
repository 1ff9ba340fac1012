"""A held request: its outputs, and which of them were sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.batching.state import WIRE_IDS, Finish
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import ID_BYTES, id_count
from antiphon.wire.heartbeat import RunningRequest
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsBuffer, join_token_outputs
from antiphon.wire.tokens import TokenRow, TokenStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.model_worker.batching.state import ChoiceKey, Progress
    from antiphon.model_worker.batching.token_store import OutputIds
    from antiphon.wire.base import Attempt
    from antiphon.wire.command import Admit, ChoiceOutput, Rebind
    from antiphon.wire.ids import Incarnation

ROW_IDS_MAX = 16_384
"""Maximum ids of a row: a replay after an outage is split into messages of a sane size."""
ROW_DETAILS_BYTES_MAX = 64 * 1024
"""Maximum bytes of a row's logprobs and hidden states."""


class HeldChoice:
    """One choice, and how much of its outputs was sent.

    The output ids are in the batching loop's store, and so are the logprobs of sampled tokens where
    nothing else is returned of these. All other logprobs and hidden states are here: those of
    prompt tokens at negative offsets, then those of each output.

    Attributes:
        slot: The slot in which it runs, by the last progress; -1 if in none.
        length: Number of output ids. Not current while its stream is plain; see `PlainStreams`.
        has_logprobs: Whether those of sampled tokens are returned.
        lacks_details: Only the detokenizer of an earlier attempt has those of its sealed output.
    """

    def __init__(
        self, admit: Admit, output: ChoiceOutput, key: ChoiceKey, details_from: int | None
    ) -> None:
        params = admit.sampling.details
        self.index = output.choice
        self.key = key
        self.slot = -1
        self.length = id_count(output.output_ids)
        self.finish: Finish | None = _sealed_finish(output)
        self.has_logprobs = params is not None and params.logprobs
        self._request_id = admit.request_id
        self._attempt = admit.attempt
        self._number = key if admit.columns else None
        self._first_ids = output.output_ids  # until it has `_outputs`
        self._outputs: OutputIds | None = None
        self._in_store = params is not None and params.sampled_only
        self._details = None if details_from is None else TokenOutputsBuffer(details_from)
        sealed = bool(output.output_ids) or self.finish is not None
        self._first = self._sent = self._details_from = details_from or 0
        self.lacks_details = False
        if self._details is not None and output.details is not None and sealed:
            self._details.append(output.details)
        elif self._details is not None and sealed:
            self._details = TokenOutputsBuffer(self.length)
            self._first = self._sent = self.length
            self.lacks_details = True
        self._end_sent = self._number_sent = False
        self._stopped = False
        self._origins: dict[int, tuple[str, int]] = {}  # weights, retractions; by first offset

    @property
    def live(self) -> bool:
        return self.finish is None and not self._stopped

    @property
    def end_unsent(self) -> bool:
        """Whether its detokenizer still waits for its end."""
        return not (self._end_sent or self._stopped)

    @property
    def can_be_plain(self) -> bool:
        """Whether its next token may go into columns."""
        return self.live and self.slot >= 0 and self._number_sent and self._sent == self.length

    def extend(self, progress: Progress) -> None:
        assert self.live, "a choice continued after its end"
        if progress.end > progress.start or not self._origins:
            self._note_origin((progress.weights, progress.retractions))
        if progress.outputs is not None:
            assert progress.start == self.length, "a token is missing, or was reported twice"
            self._outputs, self._first_ids = progress.outputs, b""
            self.length = progress.end
        if self._details is not None:
            self._details.append(progress.details)
            needed = 0 if self._in_store else self.length
            assert self._details.end >= needed or not self.length, "a token has no details"
        self.slot = progress.slot
        self.finish = progress.finish

    def mark_sent(self, length: int) -> None:
        """Note that it has so many outputs, and that all of them were sent."""
        self.length = self._sent = length

    def fail(self, finish: Finish) -> None:
        """End it where it was sent up to: a row after a gap would be requested for ever."""
        self.finish = finish
        self.length = max(0, min(self.length, self._sent))
        if self._details is not None:
            self._details.truncate(self._sent)

    def lose(self, finish: Finish) -> None:
        """End it as one without output: its detokenizer cannot be sent all of it."""
        self.finish, self.length, self._stopped = finish, 0, False
        self._outputs, self._first_ids = None, b""
        self._first = self._details_from
        if self._details is not None:
            self._details = TokenOutputsBuffer(self._first)
        self.rewind(self._first)

    def can_rewind(self, offset: int) -> bool:
        """Whether it has all of its output from `offset` on."""
        return not self.lacks_details or self._stopped or offset >= self._first

    def stop(self, offset: int | None = None) -> int:
        """End it without a finish message, cut at `offset`; return the number of ids cut off.

        A detokenizer that takes the place of the one which has cut it there needs the outputs
        before.
        """
        if offset is None:
            self.silence()
            return 0
        overrun = max(0, self.length - max(0, offset))
        self.length -= overrun
        if self._details is not None:
            self._details.truncate(self.length)
        self.finish = self.finish or Finish(reason=FinishReason.STOP)
        self._stopped = True
        return overrun

    def silence(self) -> None:
        """Send no more of it, not even again."""
        self._stopped = True
        self._outputs = self._details = self.finish = None

    def rebind(self, attempt: Attempt, *, columns: bool) -> None:
        """Send all of it again, as another attempt. One that was silenced has nothing to send."""
        self._attempt = attempt
        self._number = self.key if columns else None
        if self.finish is not None:
            self._stopped = False
        self.rewind(self._first)

    def rewind(self, offset: int) -> None:
        """Send again from `offset` on, the finish included."""
        self._sent = min(max(self._first, offset), self._end)
        self._end_sent = self._number_sent = False

    def unsent(self, stream: TokenStream | None) -> Iterator[TokenRow]:
        """Take what was not sent yet, in rows of bounded size and a single origin each.

        The first row carries `stream`. A row that cannot be made is not taken.
        """
        while not self._stopped and (
            self._sent < self._end or (self.finish is not None and not self._end_sent)
        ):
            offset = self._sent
            (weights, retractions), until = self._origin_at(offset)
            end = self._row_end(until)
            finish = self.finish if end == self._end else None
            row = TokenRow(
                request_id=self._request_id,
                choice=self.index,
                attempt=self._attempt,
                offset=offset,
                token_ids=self._ids(max(0, offset), max(0, end)),
                details=self._token_outputs(offset, end),
                stream=stream,
                stream_number=self._number,
                weights=weights,
                retractions=retractions,
                finish_reason=finish.reason if finish else None,
                matched_stop=finish.matched_stop if finish else None,
                error=finish.error if finish else None,
            )
            self._sent, self._end_sent = end, finish is not None
            self._number_sent = self._number is not None
            yield row
            stream = None

    @property
    def _end(self) -> int:
        """The offset up to which there are tokens to send, of the prompt or the output."""
        if self._details is None:
            return self.length
        whole_prompt = self._in_store and self._details.end >= 0
        return max(self.length, self._details.end) if whole_prompt else self._details.end

    def _row_end(self, until: int | None) -> int:
        """Where the next row ends, at the latest where the origin of its tokens does."""
        offset, end = self._sent, self._end
        if offset < 0 <= end:
            end = 0  # a row holds prompt tokens or output tokens: only the latter have ids
        elif until is not None:
            end = min(end, until)
        if self._details is not None:
            token_bytes = max(self._details.token_bytes, 2 * ID_BYTES)
            end = min(end, offset + max(1, ROW_DETAILS_BYTES_MAX // token_bytes))
        return min(end, offset + ROW_IDS_MAX)

    def _ids(self, start: int, end: int) -> bytes:
        if start == end:
            return b""
        if self._outputs is None:
            return self._first_ids[start * ID_BYTES : end * ID_BYTES]
        return self._outputs.read(start, end).astype(WIRE_IDS, copy=False).tobytes()

    def _token_outputs(self, start: int, end: int) -> TokenOutputs | None:
        """Those of tokens [start, end): first the ones that are here, then those in the store."""
        if self._details is None or start == end:
            return None
        here, first = self._details.read(start, end), max(start, self._details.end)
        if first >= end or self._outputs is None:
            return here
        logprobs = self._outputs.read_logprobs(first, end).astype("<f4", copy=False).tobytes()
        sampled = TokenOutputs(
            count=end - first,
            token_ids=self._ids(first, end),
            logprobs=logprobs if self.has_logprobs else b"",
        )
        return join_token_outputs((here, sampled)) if here.count else sampled

    def _note_origin(self, origin: tuple[str, int]) -> None:
        """Note the weights that sample the next outputs, and the retractions before these."""
        if next(reversed(self._origins.values()), None) != origin:
            self._origins[self.length] = origin

    def _origin_at(self, offset: int) -> tuple[tuple[str | None, int], int | None]:
        """The origin of the output at an offset, and where the next origin begins.

        The first one also counts for outputs before it, which came with the admit.
        """
        found: tuple[str | None, int] | None = None
        for start, origin in self._origins.items():
            if found is not None and start > max(0, offset):
                return found, start
            found = origin
        return found or (None, 0), None


def _sealed_finish(output: ChoiceOutput) -> Finish | None:
    if output.finish_reason is None:
        return None
    return Finish(reason=output.finish_reason, matched_stop=output.matched_stop)


class HeldRequest:
    """A request from its admission until its owner no longer lists it.

    Its prompt is not here: the batching loop has it, and it is never sent.

    Attributes:
        columns: Whether its detokenizer reads `TokenColumns`.
        due_ms: Its deadline, by our clock.
        requeued: Heartbeats list it until the leader runs another attempt.
        resume_ms: How long it goes on without an owner, if none adopts it before.
        unowned_ms: When its owner has died, or has closed it, by our clock.
        media: Its media, with claims at the owner that it has by now.
    """

    def __init__(self, admit: Admit, keys: Sequence[ChoiceKey], now_ms: int, due_ms: int) -> None:
        prompt_tokens = admit.prompt_tokens
        self.request_id = admit.request_id
        self.owner = admit.owner
        self.attempt = admit.attempt
        self.detokenizer = admit.detokenizer
        self.due_ms = due_ms
        self.admitted_ms = now_ms
        self.cached_tokens = 0
        self.listed_after_end = False
        self.started = False
        self.requeued = False
        self.resume_ms = admit.resume_ms
        self.unowned_ms: int | None = None
        self.media = admit.media
        self.tokens_max = prompt_tokens + admit.sampling.max_new_tokens
        self._stream = TokenStream(
            owner=admit.owner,
            prompt_tokens=prompt_tokens,
            details_from=admit.sampling.details_from(prompt_tokens),
            choices=len(admit.choices),
            continues=admit.continues,
            lineage=admit.lineage,
            detokenizer_incarnation=admit.detokenizer_incarnation,
            owner_sealed=admit.owner_sealed,
            continued=tuple(id_count(choice.output_ids) for choice in admit.choices),
            stop=admit.stop,
            deadline_unix_ms=admit.deadline_unix_ms,  # by its owner's clock
            traceparent=admit.traceparent,
            resume_ms=admit.resume_ms,
        )
        self.choices = [
            HeldChoice(admit, choice, key, self._stream.details_from)
            for choice, key in zip(admit.choices, keys, strict=True)
        ]
        self._introduced = False
        self._began_tokens = self.tokens

    @property
    def detokenizer_incarnation(self) -> Incarnation | None:
        return self._stream.detokenizer_incarnation

    @property
    def live(self) -> bool:
        return any(choice.live for choice in self.choices)

    @property
    def lacks_details(self) -> bool:
        return any(choice.lacks_details for choice in self.choices)

    @property
    def tokens(self) -> int:
        return sum(choice.length for choice in self.choices)

    def line(self, *, exact: bool) -> RunningRequest:
        """What the leader reads of it; unless `exact`, few new tokens change it."""
        tokens = self.tokens
        if not exact and (new := tokens - self._began_tokens) > 0:
            tokens = self._began_tokens + (1 << (new.bit_length() - 1))
        return RunningRequest(
            request_id=self.request_id,
            attempt=self.attempt,
            tokens=tokens,
            detokenizer=self.detokenizer,
            detokenizer_incarnation=self.detokenizer_incarnation,
            ended=not self.live,
            waiting=not self.started,
            returned=self.requeued,
        )

    def rebind(self, message: Rebind, now_ms: int) -> None:
        """Send all of it again, to another detokenizer or for another owner."""
        self.attempt, self.detokenizer = message.attempt, message.detokenizer
        if len(message.media) == len(self.media):
            self.media = message.media
        stream = self._stream
        if message.owner is not None and message.owner != self.owner:
            self.owner, self.unowned_ms = message.owner, None
            self.admitted_ms = now_ms  # a list that its new owner has sent before may not name it
            self.listed_after_end = False
            deadline_unix_ms = message.deadline_unix_ms or stream.deadline_unix_ms
            stream = msgspec.structs.replace(
                stream, owner=message.owner, deadline_unix_ms=deadline_unix_ms
            )
        self._stream = msgspec.structs.replace(
            stream,
            continues=message.continues,
            lineage=stream.earlier,
            detokenizer_incarnation=message.detokenizer_incarnation,
            owner_sealed=False,
            continued=tuple(choice.length for choice in self.choices),
        )
        self._introduced = False
        for choice in self.choices:
            choice.rebind(message.attempt, columns=message.columns)

    def rewind(self, offsets: dict[int, int]) -> None:
        """Send again from these offsets on, by choice; from the start where none is given."""
        self._introduced = False
        for choice in self.choices:
            choice.rewind(offsets.get(choice.index, self._stream.details_from or 0))

    def can_rewind(self, offsets: dict[int, int]) -> bool:
        """Whether it has all output from these offsets on, by choice."""
        has = {choice.index: choice.can_rewind for choice in self.choices}
        return all(has[index](offset) for index, offset in offsets.items() if index in has)

    def repeat_end(self) -> None:
        self.rewind({choice.index: choice.length for choice in self.choices})

    def unsent(self) -> Iterator[TokenRow]:
        """Take the rows that were not sent yet; the first of all carries the `TokenStream`."""
        for choice in self.choices:
            for row in choice.unsent(None if self._introduced else self._introduction()):
                self._introduced = True
                yield row

    def _introduction(self) -> TokenStream:
        return msgspec.structs.replace(self._stream, cached_tokens=self.cached_tokens)
