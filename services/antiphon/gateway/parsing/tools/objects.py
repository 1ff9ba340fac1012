"""Calls as JSON objects: name and arguments, in either order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.parsing import json_text
from antiphon.gateway.parsing.reader import Emit, Steps, drop
from antiphon.gateway.parsing.tools.format import CallOutcome

if TYPE_CHECKING:
    from antiphon.gateway.parsing.event_sink import EventSink
    from antiphon.gateway.parsing.reader import Reader
    from antiphon.gateway.parsing.tools.format import Body

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("type", "id", "tool_call_id")


def call(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    """Read `{"name": ..., "arguments": ...}`. Other keys are skipped."""
    return (yield from _Object(reader, out, certain=True).read())


def likely_call(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    """Read an object that may be content.

    It is a call if it names an available tool, or has a name and arguments.
    """
    return (yield from _Object(reader, out, certain=False).read())


def calls(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    """Read one call or a list of calls. If the first one is not a call, none is."""
    return (yield from _calls(reader, out, call))


def likely_calls(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    """Read one call or a list of calls that may be content: see `likely_call`."""
    return (yield from _calls(reader, out, likely_call))


def calls_in_list(reader: Reader, out: EventSink, one: Body = call) -> Steps[CallOutcome]:
    """Read a list of calls after its opening bracket."""
    outcome = CallOutcome.NOTHING
    while True:
        yield from reader.space()
        if (yield from reader.starts("]")):
            return outcome
        if outcome is CallOutcome.DONE and (yield from reader.starts(",")):
            continue
        again = yield from one(reader, out)
        if again is not CallOutcome.DONE:
            return CallOutcome.BROKEN if outcome is CallOutcome.DONE else again
        outcome = again
        one = call  # a list whose first item is a call has only calls


def _calls(reader: Reader, out: EventSink, one: Body) -> Steps[CallOutcome]:
    yield from reader.space()
    if not (yield from reader.starts("[")):
        return (yield from one(reader, out))
    return (yield from calls_in_list(reader, out, one))


class _Object:
    def __init__(self, reader: Reader, out: EventSink, *, certain: bool) -> None:
        self._reader = reader
        self._out = out
        self._certain = certain
        self._emit: Emit | None = None
        self._early: list[str] | None = None  # arguments that came before the name

    def read(self) -> Steps[CallOutcome]:
        reader = self._reader
        yield from reader.space()
        if not (yield from reader.starts("{")):
            return CallOutcome.NOTHING
        argued = False
        while True:
            yield from reader.space()
            if (yield from reader.starts("}")):
                return self._finish(argued=argued)
            key = yield from json_text.text(reader)
            yield from reader.space()
            if key is None or not (yield from reader.starts(":")):
                return self._broken()
            yield from reader.space()
            is_arguments = key in _ARGUMENTS and not argued
            argued = argued or is_arguments
            if not (yield from self._value(key, is_arguments=is_arguments)):
                return self._broken()
            yield from reader.space()
            if not (yield from reader.starts(",")) and (yield from reader.peek()) != "}":
                return self._broken()

    def _value(self, key: str, *, is_arguments: bool) -> Steps[bool]:
        if key in _NAMES and self._emit is None:
            return (yield from self._name())
        if is_arguments:
            if self._emit is None:
                self._early = []
            emit = self._emit or self._collect
            return (yield from json_text.arguments(self._reader, emit))
        if not self._certain and self._emit is None and key not in _BESIDE:
            return False
        return (yield from json_text.value(self._reader, drop))

    def _name(self) -> Steps[bool]:
        name = yield from json_text.text(self._reader)
        if name is None:
            return False
        self._certain = self._certain or self._out.knows(name)
        self._emit = self._out.begin(self._reader, name)
        self._emit("".join(self._early or ()))
        return True

    def _collect(self, part: str) -> None:
        assert self._early is not None, "arguments were read"
        self._early.append(part)

    def _broken(self) -> CallOutcome:
        if self._emit is None:
            return CallOutcome.NOTHING
        self._out.end(self._reader, complete=False)
        return CallOutcome.BROKEN

    def _finish(self, *, argued: bool) -> CallOutcome:
        if self._emit is None:
            return CallOutcome.NOTHING
        if not argued:
            if not self._certain:
                return CallOutcome.NOTHING
            self._emit("{}")
        self._out.end(self._reader, complete=True)
        return CallOutcome.DONE
