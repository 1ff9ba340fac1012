"""What an answer of a chat is made of: content, thinking and calls, as its text comes in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.answer import AnswerParser
from antiphon.gateway.parsing.events import CallEnd, Content, Event, Reasoning
from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
from antiphon.gateway.parsing.tools.choice import ToolPlan

if TYPE_CHECKING:
    from collections.abc import Iterable


class OutputParserOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers of a request are taken apart.

    Attributes:
        plan: What may be called, and how calls are written.
        reasoning: How thinking is marked; None: it is not told apart.
        stream_reasoning: Whether it is told as it comes, or once it is over.
        calls_before: Calls in the messages of the request.
    """

    plan: ToolPlan = ToolPlan()
    reasoning: ReasoningFormat | None = None
    stream_reasoning: bool = True
    calls_before: int = 0

    @property
    def plain(self) -> bool:
        """Whether an answer is content and nothing else."""
        return self.plan.format is None and self.reasoning is None


class OutputParser:
    """One answer, taken apart.

    Attributes:
        called: Whether a whole call was heard.
    """

    def __init__(self, options: OutputParserOptions, *, starts_in_reasoning: bool) -> None:
        """Nothing was heard yet; `inside`: the answer begins as thinking."""
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
        """Take more of the text; return what is certain now."""
        if self._plain:
            return [Content(text)] if text else []
        return self._filter_reasoning(self._parser.feed(text))

    def end(self) -> list[Event]:
        """Return what is left: the answer is over."""
        if self._plain:
            return []
        return [*self._filter_reasoning(self._parser.end()), *self._flush_reasoning()]

    def _filter_reasoning(self, events: Iterable[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning) and not self._stream_reasoning:
                self._held_reasoning.append(event.text)
                continue
            if isinstance(event, CallEnd):
                self.has_tool_calls |= event.complete
            told += [*self._flush_reasoning(), event]
        return told

    def _flush_reasoning(self) -> list[Event]:
        """The thinking that was held back, once."""
        thought, self._held_reasoning = "".join(self._held_reasoning), []
        return [Reasoning(thought)] if thought else []
