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


class Hearing(msgspec.Struct, frozen=True, kw_only=True):
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


class Speech:
    """One answer, taken apart.

    Attributes:
        called: Whether a whole call was heard.
    """

    def __init__(self, hearing: Hearing, *, inside: bool) -> None:
        """Nothing was heard yet; `inside`: the answer begins as thinking."""
        self.called = False
        self._plain = hearing.plain
        self._at_once = hearing.stream_reasoning
        self._thought: list[str] = []
        self._parser = AnswerParser(
            tools=hearing.plan.format,
            offer=hearing.plan.offer(calls_before=hearing.calls_before),
            reasoning=hearing.reasoning,
            inside=inside,
        )

    def feed(self, text: str) -> list[Event]:
        """Take more of the text; return what is certain now."""
        if self._plain:
            return [Content(text)] if text else []
        return self._noted(self._parser.feed(text))

    def end(self) -> list[Event]:
        """Return what is left: the answer is over."""
        if self._plain:
            return []
        return [*self._noted(self._parser.end()), *self._thoughts()]

    def _noted(self, events: Iterable[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning) and not self._at_once:
                self._thought.append(event.text)
                continue
            if isinstance(event, CallEnd):
                self.called |= event.complete
            told += [*self._thoughts(), event]
        return told

    def _thoughts(self) -> list[Event]:
        """The thinking that was held back, once."""
        thought, self._thought = "".join(self._thought), []
        return [Reasoning(thought)] if thought else []
