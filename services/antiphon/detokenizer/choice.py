"""State of a request and its choices: token ids in, text out, stops, reasoning tokens, ends."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from antiphon.detokenizer.incremental import Decode, IncrementalDecoder, TokenTexts
from antiphon.text.stop_patterns import StopPatternMatcher, compile_pattern
from antiphon.wire.base import Attempt, FinishReason, Process, Usage
from antiphon.wire.codec import ID_BYTES, id_count, pack_ids
from antiphon.wire.command import ChoiceOutput
from antiphon.wire.sampling import SPACE_MAX, StopStrings, ThinkingMarks
from antiphon.wire.text import Origin, TextRow
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsBuffer, TokenOutputsChunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.wire.errors import ErrorReply
    from antiphon.wire.ids import InstanceId, RequestId
    from antiphon.wire.tokens import TokenRow, TokenStream

PIECE_BYTES: Final = 64 * 1024
"""Maximum text, token outputs and token ids in one row: an answer may be larger than a message."""


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    finish_reason: FinishReason
    matched_stop: str | int | None = None
    error: ErrorReply | None = None


class ChoiceState:
    """State of one choice of one request: fixes which token is at which offset.

    Attributes:
        first: The first offset: 0, or less if prompt tokens are included in the token outputs.
        offset: The next offset that is accepted.
        emitted: The offset up to which token outputs are sent: they determine at least all emitted
            text, as those after a token of which only a part is emitted do.
        output_ids: The accepted output tokens, int32.
        ids_sent: How many of them its gateway was sent.
        origins: Where its tokens come from, in their order.
        end: Set once; no token is accepted after it.
    """

    def __init__(self, decode: Decode, stop: StopStrings, first: int = 0) -> None:
        self.first = self.offset = self.emitted = first
        self.output_ids = array("i")
        self.ids_sent = 0
        self.origins: tuple[Origin, ...] = ()
        self.end: ChoiceResult | None = None
        self._details = TokenOutputsBuffer(first)
        self._decoder = IncrementalDecoder(decode, stop.skip_special_tokens)
        self._scanner = StopScanner(stop.strings, stop.include, stop.patterns)
        self._thinking = None if stop.thinking is None else ThinkingCounter(stop.thinking)
        self._text = bytearray()

    @property
    def tokens(self) -> int:
        """Number of accepted output tokens."""
        return len(self.output_ids)

    @property
    def text_bytes(self) -> int:
        return len(self._text)

    @property
    def details_bytes(self) -> int:
        return self._details.size_bytes

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._thinking is None else self._thinking.tokens

    def accept(self, offset: int, token_ids: Sequence[int], details: TokenOutputs | None) -> None:
        """Accept the new tokens of a row that begins at `offset`, at most the next offset.

        A token may complete a stop string and end the choice; later tokens do not count.
        """
        known = self.offset - offset
        for token_id in token_ids[known:] if known else token_ids:
            self.push(token_id)
            if self.end is not None:
                break
        if details is not None and known < details.count:
            self._details.append(details.drop_first(known))
            if self.end is not None:
                self._details.truncate(self.offset)
            self.offset = self._details.end
        self._update_emitted()

    def record_origin(self, worker: InstanceId, row: TokenRow, weights: str) -> None:
        """Record where the tokens of a row come from, before they are accepted.

        A row without an origin continues that of the row before it; the origin of a row without new
        tokens is about earlier tokens.
        """
        if self.origins and row.offset + id_count(row.token_ids) <= self.tokens:
            return
        origin = Origin(
            start=self.tokens, worker=worker, weights=weights, retractions=row.retractions
        )
        before = tuple(each for each in self.origins if each.start < self.tokens)
        if not before:  # the origin of earlier tokens, if any, is not known any more
            self.origins = (msgspec.structs.replace(origin, start=0),)
        elif before[-1] != msgspec.structs.replace(origin, start=before[-1].start):
            self.origins = (*before, origin)

    def push(self, token_id: int) -> None:
        assert self.end is None, "a token after the end of its choice"
        self.offset += 1
        self.output_ids.append(token_id)
        self._emit(self._decoder.push(token_id))

    def finish(self, end: ChoiceResult) -> None:
        """End the choice as the worker reports, unless the held-back text contains a stop."""
        if self.end is None:
            self._emit(self._decoder.flush())
        if self.end is None:
            self._text += self._scanner.flush().encode()
            self.end = end
        self._update_emitted()

    def sealed(self, index: int, *, with_details: bool) -> ChoiceOutput:
        """What was accepted, for an attempt that continues from there."""
        end = self.end
        matched = None if end is None or isinstance(end.matched_stop, str) else end.matched_stop
        return ChoiceOutput(
            choice=index,
            output_ids=pack_ids(self.output_ids),
            details=self._details.read(self.first, self.offset) if with_details else None,
            finish_reason=None if end is None else end.finish_reason,
            matched_stop=matched,
        )

    def can_resume_at(self, text_offset: int, token_offset: int, tokens: int) -> bool:
        """Whether it can be sent from these offsets: within the text, not inside a character."""
        inside = text_offset <= len(self._text) and self.first <= token_offset <= self.emitted
        return inside and tokens <= self.tokens and self._border(text_offset) == text_offset

    def text_chunks(self, text_offset: int) -> Iterator[tuple[int, str]]:
        """Yield the text beyond a byte offset as (offset, text); at least one, perhaps empty."""
        while True:
            end = self._border(text_offset + PIECE_BYTES)
            yield text_offset, self._text[text_offset:end].decode()
            if end == len(self._text):
                return
            text_offset = end

    def id_chunks(self, id_start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the output ids from an index on as (end, ids); at least one, perhaps empty."""
        step = PIECE_BYTES // ID_BYTES
        for start in range(id_start, max(id_start + 1, self.tokens), step):
            end = min(self.tokens, start + step)
            yield end, pack_ids(self.output_ids[start:end])

    def token_output_chunks(self, token_offset: int) -> Iterator[tuple[int, TokenOutputs]]:
        """Yield token outputs from an offset on as (offset, outputs); at least one, perhaps empty.

        They go as far as the text does.
        """
        step = max(1, PIECE_BYTES // max(1, self._details.token_bytes))
        while True:
            end = min(self.emitted, token_offset + step)
            yield token_offset, self._details.read(token_offset, end)
            if end == self.emitted:
                return
            token_offset = end

    def _update_emitted(self) -> None:
        if self.end is not None and self._thinking is not None:
            self._thinking.end(self.tokens)
        if self.end is not None or not (self._decoder.has_pending or self._scanner.has_pending):
            self.emitted = self.offset

    def _emit(self, text: str) -> None:
        if self._thinking is not None:
            self._thinking.push(text, self.tokens)
        shown = self._scanner.push(text)
        if isinstance(shown, StopMatch):
            self.end = ChoiceResult(FinishReason.STOP, matched_stop=shown.stop)
            shown = shown.text
        if shown:
            self._text += shown.encode()
            self.emitted = self.offset

    def _border(self, text_offset: int) -> int:
        """The last offset up to `text_offset` where a character begins or the text ends."""
        if text_offset >= len(self._text):
            return len(self._text)
        while self._text[text_offset] & 0xC0 == 0x80:  # a continuation byte in UTF-8
            text_offset -= 1
        return text_offset


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop was found. `text` is the text to emit before the end."""

    stop: str
    text: str


class StopScanner:
    """Holds back text that may be the beginning of a stop, until that is decided."""

    def __init__(
        self, strings: tuple[str, ...], include: bool, patterns: tuple[str, ...] = ()
    ) -> None:
        self._strings = strings
        self._patterns = tuple(
            (pattern, StopPatternMatcher(compile_pattern(pattern))) for pattern in patterns
        )
        self._include = include
        self._held = ""
        self._held_at = 0  # where it begins in the whole text

    @property
    def has_pending(self) -> bool:
        return bool(self._held)

    def push(self, text: str) -> str | StopMatch:
        """Add text; return the text that may be emitted, or the earliest match.

        Of two stops that begin at the same position, the one named first in the request wins, and a
        string before a pattern.
        """
        if not self._strings and not self._patterns:
            return text
        matches = self._matches(text)
        text = self._held + text
        matches = [*self._found(text), *matches]
        if matches:
            start, end, stop = min(matches, key=lambda match: match[0])
            self._held = ""
            return StopMatch(stop, text[: end if self._include else start])
        held = max((partial_match_length(text, stop) for stop in self._strings), default=0)
        end_at = self._held_at + len(text)
        partial = (end_at - matcher.held_from for _, matcher in self._patterns)
        held = max(held, *partial, 0)
        self._held = text[len(text) - held :]
        self._held_at = end_at - held
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return the held-back text: the choice has ended, so no stop can be completed."""
        held, self._held = self._held, ""
        return held

    def _found(self, text: str) -> list[tuple[int, int, str]]:
        """The first occurrence of each string, as (start, end, string)."""
        starts = ((text.find(stop), stop) for stop in self._strings)
        return [(at, at + len(stop), stop) for at, stop in starts if at >= 0]

    def _matches(self, text: str) -> list[tuple[int, int, str]]:
        """Each matched pattern as (start, end, pattern), relative to the held-back text."""
        matches = ((matcher.feed(text), pattern) for pattern, matcher in self._patterns)
        return [
            (match[0] - self._held_at, match[1] - self._held_at, pattern)
            for match, pattern in matches
            if match is not None
        ]


def partial_match_length(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class ThinkingCounter:
    """Counts one choice's reasoning tokens, however its text is split into tokens.

    A token that is partly reasoning counts. The gateway splits the text by the same markers.

    Attributes:
        tokens: Tokens so far that are certain to be reasoning.
    """

    def __init__(self, marks: ThinkingMarks) -> None:
        self.tokens = 0
        self._marks = marks
        self._thinks = marks.inside
        self._over = False
        self._text = ""  # the undecided text
        self._at = 0  # where it begins in the whole text
        self._ends: deque[tuple[int, int]] = deque()  # ends of text and tokens, from there on
        self._before = (0, 0)  # the last end before it
        self._counted = 0  # tokens of reasoning that has ended
        self._closed_at = 0  # tokens up to its end
        self._from = 0  # tokens before the reasoning that has not ended

    def push(self, text: str, tokens: int) -> None:
        if self._over or not text:
            return
        self._text += text
        self._ends.append((self._at + len(self._text), tokens))
        while not self._over and (self._close() if self._thinks else self._open()):
            pass
        self.tokens = self._counted
        if self._thinks:
            unsure = max((partial_match_length(self._text, c) for c in self._marks.cuts), default=0)
            self.tokens += self._reach(self._at + len(self._text) - unsure) - self._from

    def end(self, tokens: int) -> None:
        """End the choice at `tokens` tokens: unfinished reasoning extends to there."""
        if self._thinks and not self._over:
            self.tokens = self._counted + tokens - self._from
        self._over = True

    def _close(self) -> bool:
        marks = self._marks
        places = [(self._text.find(mark), mark) for mark in (marks.end, *marks.cuts)]
        if (found := min((place for place in places if place[0] >= 0), default=None)) is None:
            unsure = max(partial_match_length(self._text, mark) for _, mark in places)
            self._drop(len(self._text) - unsure)
            return False
        place, mark = found
        stop = place + len(mark) if mark == marks.end else place
        self._closed_at = self._reach(self._at + stop)
        self._counted += self._closed_at - self._from
        self._thinks, self._over = False, not marks.again
        self._drop(stop)
        return True

    def _open(self) -> bool:
        begin = self._marks.begin
        if self._marks.again:
            place = self._text.find(begin)
            if place < 0:
                self._drop(len(self._text) - partial_match_length(self._text, begin))
                return False
            self._drop(place)
            # The token that ended the previous reasoning may begin this one, too.
            self._from, place = max(self._before[1], self._closed_at), 0
        else:
            head = self._text[:SPACE_MAX]
            place = len(head) - len(head.lstrip(" \t\r\n"))
            if not self._text.startswith(begin, place):
                self._over = not begin.startswith(self._text[place:])
                return False
        self._drop(place + len(begin))
        self._thinks = True
        return True

    def _drop(self, count: int) -> None:
        self._text = self._text[count:]
        self._at += count
        while self._ends and self._ends[0][0] <= self._at:
            self._before = self._ends.popleft()

    def _reach(self, place: int) -> int:
        """Number of tokens up to a position, which is not before the undecided text."""
        if place <= self._before[0]:
            return self._before[1]
        return next(tokens for end, tokens in self._ends if end >= place)


@dataclass(slots=True)
class DetokenizerRequest:
    """A live request, or one that has ended and is not forgotten yet.

    Attributes:
        tokens: Texts of single tokens, for logprobs.
        listed_at: When the gateway's open list last named it, or when it began.
        origins_sent: How many origins were sent to the gateway, by choice.
        error: The error that ended the whole request, after a failure here.
        unowned_at: When its gateway has died, unless another one has adopted it.
        closed_at: When its gateway has closed it, unless another one has adopted it.
    """

    request_id: RequestId
    stream: TokenStream
    attempt: Attempt
    worker: Process
    choices: dict[int, ChoiceState]
    tokens: TokenTexts
    listed_at: float
    origins_sent: dict[int, int] = field(default_factory=dict[int, int])
    error: ErrorReply | None = None
    unowned_at: float | None = None
    closed_at: float | None = None

    @property
    def owner(self) -> Process:
        return self.stream.owner

    def is_abandoned(self, now: float) -> bool:
        """Whether its gateway is dead, and no other one has adopted it in time."""
        since = self.unowned_at
        return since is not None and now - since >= self.stream.resume_ms / 1000

    def is_closed(self, since: float) -> bool:
        """Whether its gateway has closed it, by this time."""
        return self.closed_at is not None and self.closed_at <= since

    @property
    def ended(self) -> bool:
        choices = self.choices.values()
        return self.error is not None or all(choice.end is not None for choice in choices)

    @property
    def details_bytes(self) -> int:
        return sum(choice.details_bytes for choice in self.choices.values())

    @property
    def lacks_continued(self) -> bool:
        """Whether its worker still sends what earlier attempts may have shown."""
        sent = zip(self.choices.values(), self.stream.continued, strict=False)
        return self.error is None and any(
            choice.end is None and choice.tokens < tokens for choice, tokens in sent
        )

    @property
    def usage(self) -> Usage:
        completion_tokens = reasoning_tokens = 0
        for choice in self.choices.values():
            completion_tokens += choice.tokens
            reasoning_tokens += choice.reasoning_tokens
        return Usage(
            prompt_tokens=self.stream.prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=self.stream.cached_tokens,
            reasoning_tokens=reasoning_tokens,
        )

    def rows(
        self, index: int, text_start: int, token_start: int, id_start: int
    ) -> Iterator[TextRow]:
        """Yield text, token outputs and ids from these offsets; the last row has the end, if any.

        Ids come before the text that they determine.
        """
        if self.error is not None:
            yield TextRow(
                request_id=self.request_id,
                choice=index,
                attempt=self.attempt,
                continues=self.stream.continues,
                lineage=self.stream.lineage,
                text_offset=0,
                finish_reason=FinishReason.ERROR,
                error=self.error,
            )
            return
        choice = self.choices[index]
        ids = list(choice.id_chunks(id_start))
        choice.ids_sent = choice.tokens
        texts = [(text_start, "")] * (len(ids) - 1) + list(choice.text_chunks(text_start))
        pieces = self._detail_pieces(choice, token_start)
        texts += [(choice.text_bytes, "")] * (len(pieces) - len(texts))
        # Each row names the end of the outputs, so that a gateway that has the last row sees a gap.
        if pieces:
            rest = TokenOutputsChunk(offset=choice.emitted, details=TokenOutputs())
            pieces += [rest] * (len(texts) - len(pieces))
        for number, (text_offset, text) in enumerate(texts):
            end = choice.end if number == len(texts) - 1 else None
            tokens, packed = ids[min(number, len(ids) - 1)]
            yield TextRow(
                request_id=self.request_id,
                choice=index,
                attempt=self.attempt,
                continues=self.stream.continues,
                lineage=self.stream.lineage,
                text_offset=text_offset,
                text=text,
                details=pieces[number] if pieces else None,
                finish_reason=end.finish_reason if end else None,
                matched_stop=end.matched_stop if end else None,
                usage=self.usage,
                tokens=tokens,
                ids=packed if number < len(ids) else b"",
                reasoning_tokens=choice.reasoning_tokens,
                origins=self._origins(index, choice),
                error=end.error if end else None,
            )

    def _origins(self, index: int, choice: ChoiceState) -> tuple[Origin, ...]:
        """The origins, if there is a new one, or the choice has ended."""
        origins = choice.origins
        if self.origins_sent.get(index) == len(origins) and choice.end is None:
            return ()
        self.origins_sent[index] = len(origins)
        return origins

    def _detail_pieces(self, choice: ChoiceState, token_start: int) -> list[TokenOutputsChunk]:
        if self.stream.details_from is None:
            return []
        chunks = choice.token_output_chunks(token_start)
        return [self._detail_piece(offset, details) for offset, details in chunks]

    def _detail_piece(self, offset: int, details: TokenOutputs) -> TokenOutputsChunk:
        stop = self.stream.stop
        if not stop.token_texts:
            return TokenOutputsChunk(offset=offset, details=details)
        ids = sorted(details.ids())
        return TokenOutputsChunk(
            offset=offset,
            details=details,
            texts=self.tokens.texts(ids),
            written=self.tokens.token_bytes(ids, skips_special=stop.skip_special_tokens),
        )
