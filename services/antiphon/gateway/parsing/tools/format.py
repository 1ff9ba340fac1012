"""Declaration of a tool call format, and readers shared by several formats."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from antiphon.gateway.parsing.events import EventSink
from antiphon.gateway.parsing.reader import Marks, Reader, Steps, drop

Read = Callable[[Reader, EventSink], Steps[None]]  # reads an output to its end

_ID_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class CallOutcome(Enum):
    NOTHING = 0  # no call: what was read is text
    BROKEN = 1  # the call began, and is incomplete
    DONE = 2
    ENDED = 3  # complete, and the delimiter after it was read, too


Body = Callable[[Reader, EventSink], Steps[CallOutcome]]
"""Reads one call without the delimiters around it. The text is kept until the name is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """How a grammar produces calls in this format.

    A call is `begin`, the name, `middle`, the arguments and `end`; `separator` is between calls.
    """

    trigger: str  # starts calls in free text, where no other text may start with it
    begin: str
    middle: str
    end: str
    separator: str = ""
    style: str = "json"  # of the arguments; otherwise the name of an XML notation
    marks: tuple[str, ...] = ()  # if they are special tokens of a model, no grammar can produce it
    excludes: tuple[str, ...] = ()  # that the reader also recognizes: free text must not have them


CallId = Callable[[str, int], str]
"""Creates an id from a name and the index of the call in the conversation."""


def random_id(_name: str, _number: int) -> str:
    return f"call_{secrets.token_hex(12)}"


def short_id(_name: str, _number: int) -> str:
    """Return nine letters and digits, which some templates require."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Tool call format of a family of models."""

    names: tuple[str, ...]  # for `--tool-call-parser`; the first is the main one
    example: str  # for the docs
    read: Read
    # Delimiters that start a call; they end reasoning, too. Empty if calls are recognized at the
    # start of the output only.
    marks: tuple[str, ...] = ()
    # The delimiters are special tokens of the model, which must be in the text: such a request is
    # sent with `skip_special_tokens` off.
    special: bool = False
    # None if no grammar can produce calls, since it cannot produce special tokens. See `formats_of`
    # for models whose tokenizers have the delimiters as plain text.
    form: CallGrammar | None = None
    call_id: CallId = random_id


def framed_format(
    names: tuple[str, ...],
    begin: str,
    end: str | None,
    body: Body,
    *,
    example: str,
    around: Sequence[str] = (),
    section: tuple[str, str] | None = None,
    special: bool = True,
    form: CallGrammar | None = None,
    call_id: CallId = random_id,
) -> ToolFormat:
    """Declare a format of text with calls between delimiters; see `framed`."""
    return ToolFormat(
        names=names,
        example=example,
        read=framed(begin, end, body, around=around, section=section),
        marks=(section[0], begin) if section else (begin,),
        special=special,
        form=form,
        call_id=call_id,
    )


def after(text: str, call: Body) -> Body:
    """Create a reader of a call that fixed text precedes."""

    def body(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
        yield from reader.space()
        if not (yield from reader.starts(text)):
            return CallOutcome.NOTHING
        return (yield from call(reader, out))

    return body


def repeated(begin: str, end: str, call: Body) -> Body:
    """Create a reader of calls that each start with a delimiter, up to the end delimiter."""

    def body(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
        outcome = CallOutcome.NOTHING
        while True:
            yield from reader.space()
            mark = yield from reader.starts(begin, end)
            if mark == end and outcome is CallOutcome.DONE:
                return CallOutcome.ENDED
            if mark != begin:
                return outcome
            match (yield from call(reader, out)):
                case CallOutcome.NOTHING:
                    return outcome
                case CallOutcome.BROKEN:
                    return CallOutcome.BROKEN
                case done:
                    outcome = done

    return body


def framed(
    begin: str,
    end: str | None,
    body: Body,
    *,
    around: Sequence[str] = (),
    section: tuple[str, str] | None = None,
) -> Read:
    """Create a reader of text with calls, each after a start delimiter.

    Everything between a call and the end delimiter is dropped, and so is the text after a malformed
    call up to the next delimiter. Also dropped are delimiters `around` text, and those of the
    `section` of all calls, unless the first call is of an unavailable tool.
    """
    others = (*around, *(section or ()))
    begins = Marks(begin, *others, trim=True)
    later = Marks(begin, *others, trim_end=True)
    ends = Marks(begin, *([end] if end else []), *others)
    opening, closing = section or (None, None)

    def read(reader: Reader, out: EventSink) -> Steps[None]:
        following = begins
        opened = ""  # start delimiter of a section without calls so far
        closes = False

        def speak(text: str) -> None:
            nonlocal opened
            opened = ""
            out.content(text)

        mark = yield from reader.until(following, speak)
        while mark is not None:
            if mark == begin:
                reader.keep(opened + reader.trimmed + mark)
                outcome = yield from body(reader, out)
                shown = out.settle(reader)
                closes = shown if opened else closes
                opened = ""
                if outcome is not CallOutcome.NOTHING:
                    following = begins if shown else later
                    if outcome is CallOutcome.BROKEN or (end and outcome is CallOutcome.DONE):
                        mark = yield from reader.until(ends, out.content if shown else drop)
                        if mark != end:
                            continue
                        if shown and mark:
                            out.content(mark)
            elif mark == opening:
                opened = reader.trimmed + mark
            elif mark == closing and closes:
                out.content(reader.trimmed + mark)
                closes = False
            mark = yield from reader.until(following, speak)

    return read
