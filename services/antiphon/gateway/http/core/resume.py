"""Streams that a client resumes: ids of events, and the rest of a stream behind one of them.

With `X-Antiphon-Resume` each event of a stream has an id, which says how much of each choice the
client has when it has the event. The same request with the id in `Last-Event-ID` continues the
stream, at any gateway: the writer is given the text from its beginning, so that its parsers reach
the same state, and what it writes of the part that the client has is dropped.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import msgspec
from aiohttp import web

from antiphon.gateway.http.core.writer import PING, ResponseWriter
from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.gateway.requests.generation_request import resume_window
from antiphon.wire.bounds import RESUME_WINDOW_MAX_S
from antiphon.wire.codec import id_count
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.ids import RequestId
from antiphon.wire.token_outputs import join_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.stream.stream import CollectedResponse
    from antiphon.wire.base import Usage
    from antiphon.wire.errors import EngineError
    from antiphon.wire.submit import ResumeWindow, SubmitRequest
    from antiphon.wire.token_outputs import TokenOutputsChunk

RESUME_HEADER = "X-Antiphon-Resume"
POSITION_HEADER = "Last-Event-ID"

FINGERPRINT = web.RequestKey("fingerprint", bytes)
"""SHA-256 of the path and the body, of a request whose stream may be resumed."""

_CURSOR = re.compile(r"(\d{1,15})(?::(-?\d{1,10}))?(\$?)", re.ASCII)
_ID = re.compile(
    r"(?P<request>[0-9a-f]{1,64})"
    r"(?:\.(?P<cursors>[-\d:$,]{1,4096})(?:~(?P<part>[-\d:$.]{1,64}))?)?",
    re.ASCII,
)
_PING_LINE = PING.removesuffix(b"\n")
"""Without the blank line: some clients take that for an event once they have seen an id."""


def note_fingerprint(request: web.Request, body: bytes) -> None:
    if RESUME_HEADER in request.headers:
        content = request.path.encode() + b"\0" + body
        request[FINGERPRINT] = hashlib.sha256(content).digest()


def refuse_resume(request: web.Request, reason: str) -> None:
    if RESUME_HEADER in request.headers:
        raise Unsupported.at(RESUME_HEADER, reason)


@dataclass(frozen=True, order=True)
class Cursor:
    """How much of one choice: bytes of its text, token outputs up to an offset, and its end."""

    text: int = 0
    tokens: int | None = None  # None: the request has no token outputs
    finished: bool = False

    def __str__(self) -> str:
        tokens = "" if self.tokens is None else f":{self.tokens}"
        return f"{self.text}{tokens}{'$' if self.finished else ''}"

    @classmethod
    def parse(cls, text: str) -> Self:
        if (match := _CURSOR.fullmatch(text)) is None:
            raise ValueError(text)
        size, tokens, finished = match.groups()
        return cls(int(size), None if tokens is None else int(tokens), bool(finished))

    def covers(self, other: Cursor) -> bool:
        """Whether this is at `other` or behind it."""
        tokens = self.tokens is None or other.tokens is None or self.tokens >= other.tokens
        finished = self.finished or not other.finished
        return self.text >= other.text and tokens and finished


@dataclass(frozen=True)
class Position:
    """A place in a stream, between two events.

    What the writer made of one input may be several events. Then `part` says how many of them the
    client has, and `choice` and `until` which input that was: the next one of this choice, up to
    there. Without a choice it is the beginning of the stream, or its end if all choices have
    finished.

    Attributes:
        cursors: Of each choice, before that input; None: nothing of the stream was received.
    """

    request_id: RequestId
    cursors: tuple[Cursor, ...] | None = None
    part: int = 0
    choice: int | None = None
    until: Cursor | None = None

    @property
    def client_has(self) -> list[tuple[int, int | None]]:
        """What the client has of each choice at least: bytes of its text, and token outputs."""
        return [(cursor.text, cursor.tokens) for cursor in self.cursors or ()]

    def __str__(self) -> str:
        if self.cursors is None:
            return self.request_id
        at = f"{self.request_id}.{','.join(map(str, self.cursors))}"
        if not self.part:
            return at
        which = "" if self.choice is None else f".{self.choice}.{self.until}"
        return f"{at}~{self.part}{which}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an id.

        Raises:
            ValueError: It is none.
        """
        if (match := _ID.fullmatch(text)) is None:
            raise ValueError(text)
        request_id = RequestId(match["request"])
        if match["cursors"] is None:
            return cls(request_id)
        cursors = tuple(map(Cursor.parse, match["cursors"].split(",")))
        if match["part"] is None:
            return cls(request_id, cursors)
        part, *which = match["part"].split(".")
        if not which:
            return cls(request_id, cursors, int(part))
        choice, until = which
        return cls(request_id, cursors, int(part), int(choice), Cursor.parse(until))


@dataclass(frozen=True)
class Resumption:
    """What a request says of resuming its stream: for how long, and from where."""

    window: ResumeWindow
    position: Position | None

    @classmethod
    def of(cls, request: web.Request) -> Self | None:
        """Read the headers; None if the stream cannot be resumed.

        Raises:
            InvalidRequest: A header is not valid.
        """
        if (seconds := request.headers.get(RESUME_HEADER)) is None:
            return None
        try:
            window_s = float(seconds)
        except ValueError:
            window_s = 0.0
        if not 0 < window_s <= RESUME_WINDOW_MAX_S:
            text = f"must be a number of seconds, at most {RESUME_WINDOW_MAX_S:g}"
            raise InvalidRequest.at(RESUME_HEADER, text)
        window = resume_window(window_s, request.get(FINGERPRINT, b""))
        if (last := request.headers.get(POSITION_HEADER)) is None:
            return cls(window, None)
        try:
            return cls(window, Position.parse(last))
        except ValueError:
            text = "must be the id of an event, or the X-Request-Id of the stream"
            raise InvalidRequest.at(POSITION_HEADER, text) from None

    def apply(
        self, gen_requests: Sequence[GenerationRequest], *, streamed: bool
    ) -> list[GenerationRequest]:
        """Mark the request of a body as one whose stream may be resumed.

        Raises:
            Unsupported: The body has several prompts, or asks for no stream.
        """
        if not streamed:
            raise Unsupported.at(RESUME_HEADER, "only streams can be resumed")
        if len(gen_requests) != 1:
            raise Unsupported.at(RESUME_HEADER, "the stream of several prompts cannot be resumed")
        return [msgspec.structs.replace(gen_requests[0], resume=self.window)]

    def writer(self, writer: ResponseWriter, submit: SubmitRequest) -> ResponseWriter:
        """Add ids to the events of a writer, and leave out those that the client has.

        Raises:
            Unsupported: Streams of this API cannot be resumed.
            InvalidRequest: The position is one of another stream.
        """
        if not writer.RESUMABLE:
            raise Unsupported.at(RESUME_HEADER, "streams of this API cannot be resumed")
        start = Position(submit.request_id) if self.position is None else self.position
        known = () if start.cursors is None else start.cursors
        choice = start.choice or 0
        if len(known) not in (0, submit.choices) or choice >= submit.choices:
            raise InvalidRequest.at(POSITION_HEADER, "it is the id of another stream")
        first = submit.sampling.details_from(id_count(submit.prompt_ids))
        return ResumableWriter(writer, start, [Cursor(tokens=first)] * submit.choices)


class ResumableWriter(ResponseWriter):
    """Numbers the events of another writer, and begins at a position of its stream."""

    def __init__(self, writer: ResponseWriter, start: Position, cursors: Sequence[Cursor]) -> None:
        self._writer = writer
        self._start = start
        self._begun = start.cursors is not None
        self._cursors = list(cursors)
        # Those that ids name: a writer may hold back what it was given last, and the client has the
        # part of a choice that is still to be replayed.
        self._written = list(start.cursors or cursors)
        # While a part of an input is to be replayed, ids name it, and cannot name another one.
        self._waiting: list[tuple[int, TextDelta | Finished]] = []
        self._replays: dict[int, ChoiceReplay] = {}
        for choice, cursor in enumerate(start.cursors or ()):
            if cursor != cursors[choice] or choice == start.choice:
                until = start.until if choice == start.choice else None
                self._replays[choice] = ChoiceReplay(cursors[choice], cursor, until, start.part)

    def full_response(self, answers: Sequence[CollectedResponse]) -> bytes:
        return self._writer.full_response(answers)

    def begin(self) -> bytes:
        events = _split(self._writer.begin())
        partial = self._start.choice is None and not self._all_finished(self._start.cursors)
        known = 0
        if self._begun:
            known = self._start.part if partial and self._start.part else len(events)
        return self._numbered(events, known)

    def chunks(self, prompt: int, events: Sequence[TextDelta | Finished]) -> bytes:
        return b"".join(self._chunk(prompt, event) for event in events)

    def ping(self) -> bytes:
        ping = self._writer.ping()
        return _PING_LINE if ping == PING else ping

    def end(self, usages: Sequence[Usage]) -> bytes:
        events = _split(self._writer.end(usages))
        at_end = self._start.choice is None and self._all_finished(self._start.cursors)
        return self._numbered(events, self._start.part if at_end else 0, last=True)

    def failure(self, error: EngineError) -> bytes:
        return self._writer.failure(error)

    async def persist(self) -> None:
        await self._writer.persist()

    def _chunk(self, prompt: int, event: TextDelta | Finished) -> bytes:
        if self._start.choice in self._replays and event.choice != self._start.choice:
            self._waiting.append((prompt, event))
            return b""
        replay = self._replays.get(event.choice)
        if replay is None:
            return self._write(prompt, event, 0)
        written: list[bytes] = []
        for part, known in replay.feed(event):
            if known is None:  # the client has all events of this part
                self._writer.chunks(prompt, [part])
                self._advance(part)
                self._written[part.choice] = self._cursors[part.choice]
            else:
                written.append(self._write(prompt, part, known))
        if replay.done:
            del self._replays[event.choice]
            waiting, self._waiting = self._waiting, []
            written += [self._chunk(*each) for each in waiting]
        return b"".join(written)

    def _write(self, prompt: int, event: TextDelta | Finished, known: int) -> bytes:
        """Write the events of one input but for the first `known` ones."""
        choice, before = event.choice, self._cursors[event.choice]
        events = _split(self._writer.chunks(prompt, [event]))
        self._advance(event)
        if not events:
            return b""
        self._written[choice] = before
        written = self._numbered(events[:-1], known, choice=choice, until=self._cursors[choice])
        self._written[choice] = self._cursors[choice]
        if known >= len(events):
            return written
        return written + _with_id(self._position(), events[-1])

    def _advance(self, event: TextDelta | Finished) -> None:
        cursor = self._cursors[event.choice]
        if isinstance(event, Finished):
            cursor = replace(cursor, finished=True)
        else:
            details = event.details
            tokens = cursor.tokens if details is None else details.end
            cursor = Cursor(cursor.text + len(event.text.encode()), tokens)
        self._cursors[event.choice] = cursor

    def _numbered(
        self,
        events: Sequence[bytes],
        known: int,
        *,
        choice: int | None = None,
        until: Cursor | None = None,
        last: bool = False,
    ) -> bytes:
        """Add ids to the events of one input, and leave out the first `known` ones."""
        written: list[bytes] = []
        for number, event in enumerate(events, 1):
            whole = choice is None and not last and number == len(events)
            position = self._position(0 if whole else number, choice, until)
            if number > known:
                written.append(_with_id(position, event))
        return b"".join(written)

    def _position(
        self, part: int = 0, choice: int | None = None, until: Cursor | None = None
    ) -> Position:
        return Position(self._start.request_id, tuple(self._written), part, choice, until)

    @staticmethod
    def _all_finished(cursors: Sequence[Cursor] | None) -> bool:
        return bool(cursors) and all(cursor.finished for cursor in cursors or ())


class ChoiceReplay:
    """Divides the text of a choice where the client's part of it ends.

    The client's part comes as one piece, whatever pieces it arrives in: a writer that leaves out
    events until there is enough text would else hold back the rest of it.
    """

    def __init__(self, first: Cursor, start: Cursor, until: Cursor | None, part: int) -> None:
        self.done = False
        self._start = start
        self._until = until
        self._part = part  # how many events of the input up to `until` the client has
        self._at = first
        self._pieces: list[TextDelta] = []

    def feed(
        self, event: TextDelta | Finished
    ) -> Iterator[tuple[TextDelta | Finished, int | None]]:
        """Yield inputs for the writer, and how many events of each the client has; None: all."""
        if isinstance(event, TextDelta):
            self._pieces.append(event)
            size, details = len(event.text.encode()), event.details
            tokens = self._at.tokens if details is None else details.end
            self._at = Cursor(self._at.text + size, tokens)
        finished = isinstance(event, Finished)
        target = self._until or self._start
        if not finished and not self._at.covers(replace(target, finished=False)):
            return
        if not finished and target.finished:
            return
        self.done = True
        text = _join(self._pieces)
        if text is not None:
            head, rest = _cut(text, self._start)
            if head is not None:
                yield head, None
            if rest is not None and self._until is not None and not self._until.finished:
                rest, last = _cut(rest, self._until)
                if rest is not None:
                    yield rest, self._part
                rest = last
            if rest is not None:
                yield rest, 0
        if isinstance(event, Finished):
            if self._start.finished:
                yield event, None
            elif self._until is not None and self._until.finished:
                yield event, self._part
            else:
                yield event, 0


def _split(data: bytes) -> list[bytes]:
    """The events of a stream; their JSON has no line breaks."""
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


def _with_id(position: Position, event: bytes) -> bytes:
    return b"id: %b\n%b" % (str(position).encode(), event)


def _join(pieces: Sequence[TextDelta]) -> TextDelta | None:
    if not pieces:
        return None
    first, last = pieces[0], pieces[-1]
    return TextDelta(
        first.choice,
        first.text_offset,
        "".join(piece.text for piece in pieces),
        last.usage,
        join_chunks(piece.details for piece in pieces),
        last.origins,
    )


def _cut(delta: TextDelta, at: Cursor) -> tuple[TextDelta | None, TextDelta | None]:
    """Divide a piece; a part without text and token outputs is None."""
    text, size = delta.text.encode(), max(0, at.text - delta.text_offset)
    # Ids name places between characters; another number is no id of ours.
    head, rest = (part.decode(errors="ignore") for part in (text[:size], text[size:]))
    before = after = delta.details
    if delta.details is not None and at.tokens is not None:
        before = delta.details.before(at.tokens)
        after = delta.details.beyond(min(at.tokens, delta.details.end))
    return (
        _part(delta, delta.text_offset, head, before),
        _part(delta, delta.text_offset + len(text[:size]), rest, after),
    )


def _part(
    delta: TextDelta, offset: int, text: str, details: TokenOutputsChunk | None
) -> TextDelta | None:
    details = details if details is not None and details.details.count else None
    if not text and details is None:
        return None
    return msgspec.structs.replace(delta, text_offset=offset, text=text, details=details)
