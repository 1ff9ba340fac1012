"""Parses chat output into content, reasoning and tool calls as it is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.answer import AnswerParser
from antiphon.gateway.parsing.events import CallEnd, Content, Event, Reasoning
from antiphon.gateway.parsing.reasoning import ReasoningFormat
from antiphon.gateway.parsing.tools.choice import ToolPlan

if TYPE_CHECKING:
    from collections.abc import Iterable


class OutputParserOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to parse the output of a request.

    Without a `reasoning` format, reasoning stays in the content. `calls_before` is the number of
    tool calls in the messages of the request.
    """

    plan: ToolPlan = ToolPlan()
    reasoning: ReasoningFormat | None = None
    stream_reasoning: bool = True
    calls_before: int = 0

    @property
    def plain(self) -> bool:
        return self.plan.format is None and self.reasoning is None


class OutputParser:
    """Parser of one output."""

    def __init__(self, options: OutputParserOptions, *, starts_in_reasoning: bool) -> None:
        self.has_tool_calls = False
        self._plain = options.plain
        self._stream_reasoning = options.stream_reasoning
        self._held_reasoning: list[str] = []
        self._parser = AnswerParser(
            tools=options.plan.format,
            offer=options.plan.offer(calls_before=options.calls_before),
            reasoning=options.reasoning,
            inside=starts_in_reasoning,
        )

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain."""
        if self._plain:
            return [Content(text)] if text else []
        return self._filter_reasoning(self._parser.feed(text))

    def end(self) -> list[Event]:
        if self._plain:
            return []
        return [*self._filter_reasoning(self._parser.end()), *self._flush_reasoning()]

    def _filter_reasoning(self, events: Iterable[Event]) -> list[Event]:
        kept_events: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning) and not self._stream_reasoning:
                self._held_reasoning.append(event.text)
                continue
            if isinstance(event, CallEnd):
                self.has_tool_calls |= event.complete
            kept_events += [*self._flush_reasoning(), event]
        return kept_events

    def _flush_reasoning(self) -> list[Event]:
        reasoning, self._held_reasoning = "".join(self._held_reasoning), []
        return [Reasoning(reasoning)] if reasoning else []
