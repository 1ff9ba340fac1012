"""What a format of tool calls declares, and the shapes that several formats share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from antiphon.gateway.parsing.event_sink import EventSink
from antiphon.gateway.parsing.reader import Marks, Reader, Steps, drop

Read = Callable[[Reader, EventSink], Steps[None]]
"""Reads an answer to its end."""

_ID_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class CallOutcome(Enum):
    """What came of reading a call."""

    NOTHING = 0
    """There is none: what was read is text like any other."""
    BROKEN = 1
    """It began, and ended incomplete."""
    DONE = 2
    ENDED = 3
    """Done, and the mark after it was read, too."""


Body = Callable[[Reader, EventSink], Steps[CallOutcome]]
"""Reads one call, without the marks around it. What it reads is kept until its name is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """How a grammar writes calls in this format.

    A call is `begin`, the name, `middle`, the arguments and `end`; `separator` stands
    between calls, `before` and `after` around all of them.

    Attributes:
        trigger: With this, in free text, calls begin: nothing else may begin with it.
        style: How the arguments are written: `json`, or the name of an XML notation.
        marks: What of it may be special tokens of a model: then no grammar writes it.
        excludes: Marks with which the format's reader sees calls, too: free text has none of them.
    """

    trigger: str
    begin: str
    middle: str
    end: str
    separator: str = ""
    before: str = ""
    after: str = ""
    style: str = "json"
    marks: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()


def random_id(_name: str, _number: int) -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def short_id(_name: str, _number: int) -> str:
    """Nine letters and digits, which some templates insist on."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls of tools.

    Attributes:
        names: What `--tool-call-parser` calls it; the first is the main one.
        example: A call, for people.
        read: Reads an answer.
        marks: With these calls begin; they end a model's thinking, too. Empty where calls are
            recognised by what the answer begins with.
        special: Whether the marks are special tokens of the model, which have to be in the text:
            such a request is sent with `skip_special_tokens` off.
        form: How a grammar writes calls; None where it cannot, as it never writes special tokens:
            see `formats_of` for models whose tokenizers have the marks as plain text.
        call_id: Makes an id from a name and the number of the call in the conversation.
    """

    names: tuple[str, ...]
    example: str
    read: Read
    marks: tuple[str, ...] = ()
    special: bool = False
    form: CallGrammar | None = None
    call_id: Callable[[str, int], str] = random_id


def framed(
    begin: str,
    end: str | None,
    body: Body,
    *,
    around: Sequence[str] = (),
    section: tuple[str, str] | None = None,
) -> Read:
    """Make a reader of text with calls in it, each one after a mark.

    Args:
        begin: The mark before each call.
        end: The one after it, if there is one. Between the call and this mark all is dropped, and
            so is what follows a broken call up to the next mark.
        body: Reads what is in between.
        around: Marks around text for the reader; they are dropped.
        section: The marks before the first call and after the last one. They are dropped, too,
            unless the first call is of a tool that was not offered.
    """
    others = (*around, *(section or ()))
    begins = Marks(begin, *others, trim=True)
    later = Marks(begin, *others, trim_end=True)
    ends = Marks(begin, *([end] if end else []), *others)
    opening, closing = section or (None, None)

    def read(reader: Reader, out: EventSink) -> Steps[None]:
        following = begins
        opened = ""  # the mark of a section without calls so far
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
