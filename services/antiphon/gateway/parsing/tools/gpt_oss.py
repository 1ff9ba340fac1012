"""Harmony, the format of gpt-oss: messages on channels, for tool calls and reasoning.

The prompt ends with `<|start|>assistant`, so an output starts inside the header of a message.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing import json_text
from antiphon.gateway.parsing.reader import Marks, Reader, Steps, drop
from antiphon.gateway.parsing.tools.format import ToolFormat

if TYPE_CHECKING:
    from antiphon.gateway.parsing.events import EventSink

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_HEADS = Marks(_START, _CHANNEL, _MESSAGE)
_BODY = Marks(_MESSAGE)
_ENDS = Marks("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_WHITE = re.compile(r"[ ]*")


def _read(reader: Reader, out: EventSink) -> Steps[None]:
    reader.keep()
    yield from reader.word(_WHITE, 1)
    mark = yield from reader.starts("to=", _CHANNEL, _START, _MESSAGE)
    before = reader.kept()
    if mark is None:
        out.content(before)
        mark = yield from reader.until(_HEADS, out.content)
    while mark is not None:
        head = [mark]
        if mark != _MESSAGE:
            body = yield from reader.until(_BODY, head.append)
            if body is None:
                out.content("".join(head))
                return
            head.append(body)
        mark = yield from _message(reader, out, "".join(head))
        if mark not in (_START, _CHANNEL, None):
            mark = yield from reader.until(_HEADS, out.content)


def _message(reader: Reader, out: EventSink, head: str) -> Steps[str | None]:
    """Read a message after its header; return the delimiter at its end."""
    if (recipient := _RECIPIENT.search(head)) is not None:
        reader.keep(head)
        emit = out.begin(reader, recipient[1])
        yield from reader.space()
        out.end(reader, complete=(yield from json_text.value(reader, emit)))
        shown = out.settle(reader)
        mark = yield from reader.until(_ENDS, out.content if shown else drop)
        if shown and mark not in (_START, _CHANNEL, None):
            out.content(mark)
        return mark
    channel = _CHANNEL_NAME.search(head)
    thinks = channel is not None and channel[1] == "analysis"
    return (yield from reader.until(_ENDS, out.reasoning if thinks else out.content))


GPT_OSS = ToolFormat(
    names=("gpt-oss",),
    example=('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'),
    read=_read,
    special=True,
)
