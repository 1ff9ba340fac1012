"""What the bus side tells the batching loop: choices to run and to drop, orders, and to stop."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.wire.command import ContinueWorker, FlushCache, PauseWorker, SetWeightVersion
from antiphon.wire.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.model_worker.batching.request import ChoiceKey, RequestState
    from antiphon.model_worker.grammar.matcher import GrammarMatcher

ControlCommand = FlushCache | PauseWorker | ContinueWorker | SetWeightVersion
"""What an operator wants of the loop. Each is obeyed between two steps, in the order given."""

COMMANDS_MAX = 64
"""Orders that may wait: the loop takes them all before each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """Everything that came since the loop last looked; `guides` of the choices with grammars.

    A drop says how many outputs are part of the answer, or None where nobody knows of one. A
    return names the choices of a request, which others run if none of them was started here.
    """

    runs: tuple[tuple[ChoiceKey, RequestState], ...] = ()
    matchers: Mapping[ChoiceKey, GrammarMatcher] = field(
        default_factory=dict["ChoiceKey", "GrammarMatcher"]
    )
    drops: Mapping[ChoiceKey, int | None] = field(default_factory=dict["ChoiceKey", "int | None"])
    requeues: tuple[tuple[ChoiceKey, ...], ...] = ()
    commands: tuple[ControlCommand, ...] = ()


class Mailbox:
    """Crosses from the event loop's thread to the batching loop's, without either waiting.

    Bounded, though `drop` never refuses: a choice dropped before it was taken just disappears, and
    the drops that remain name choices which the loop has.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._news = threading.Condition()
        self._runs: dict[ChoiceKey, RequestState] = {}
        self._guides: dict[ChoiceKey, GrammarMatcher] = {}
        self._drops: dict[ChoiceKey, int | None] = {}
        self._returns: dict[tuple[ChoiceKey, ...], None] = {}
        self._orders: list[ControlCommand] = []
        self._closed = False

    def run(
        self, key: ChoiceKey, state: RequestState, matcher: GrammarMatcher | None = None
    ) -> None:
        """Hand a choice over, with its guide if it has a grammar.

        Raises:
            Overloaded: The loop has not looked for long and the box is full.
        """
        with self._news:
            if len(self._runs) >= self._capacity:
                raise Overloaded("the worker takes no more requests now", retry_after_s=1.0)
            self._runs[key] = state
            if matcher is not None:
                self._guides[key] = matcher
            self._news.notify()

    def drop(self, key: ChoiceKey, kept: int | None = None) -> None:
        """Take a choice back, wherever it is by now; its answer ends after `kept` outputs."""
        with self._news:
            self._guides.pop(key, None)
            if self._runs.pop(key, None) is None:
                self._drops[key] = kept
                self._news.notify()

    def requeue(self, keys: tuple[ChoiceKey, ...]) -> None:
        """Have a request given up, unless it was started; the report of the step tells.

        Asked again before the loop has looked, it is one question.
        """
        with self._news:
            self._returns[keys] = None
            self._news.notify()

    def submit_command(self, order: ControlCommand) -> None:
        """Have something done between two steps.

        Raises:
            Overloaded: The loop has not looked for long and too many wait.
        """
        with self._news:
            if len(self._orders) >= COMMANDS_MAX:
                raise Overloaded("the worker obeys no more orders now", retry_after_s=1.0)
            self._orders.append(order)
            self._news.notify()

    def close(self) -> None:
        """Make the loop end after its present step."""
        with self._news:
            self._closed = True
            self._news.notify()

    def take(self, *, wait: bool, timeout_s: float | None = None) -> Mail | None:
        """Empty the box. None: it is closed.

        Args:
            wait: Sleep until there is something in it.
            timeout_s: Sleep no longer than this. None: as long as it takes.
        """
        if not (wait or self._closed or self._filled()):
            return NOTHING  # without the lock: what comes now is there the next time
        with self._news:
            if wait:
                self._news.wait_for(lambda: self._closed or self._filled(), timeout_s)
            if self._closed:
                return None
            if not self._filled():
                return NOTHING
            mail = Mail(
                runs=tuple(self._runs.items()),
                matchers=self._guides,
                drops=self._drops,
                requeues=tuple(self._returns),
                commands=tuple(self._orders),
            )
            self._runs.clear()
            self._guides = {}
            self._drops = {}
            self._returns.clear()
            self._orders.clear()
            return mail

    def _filled(self) -> bool:
        return bool(self._runs or self._drops or self._returns or self._orders)


NOTHING = Mail()
