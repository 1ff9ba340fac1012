"""What the bus side tells the batching loop: choices to run, choices to drop, and to stop."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.wire.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from antiphon.model_worker.batching.request import ChoiceKey, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """Everything that came since the loop last looked."""

    runs: tuple[tuple[ChoiceKey, RequestState], ...]
    drops: AbstractSet[ChoiceKey]
    flush: bool


class Mailbox:
    """Crosses from the event loop's thread to the batching loop's, without either waiting.

    Bounded, though `drop` never refuses: a choice dropped before it was taken just disappears, and
    the drops that remain name choices which the loop has.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._news = threading.Condition()
        self._runs: dict[ChoiceKey, RequestState] = {}
        self._drops: set[ChoiceKey] = set()
        self._flush = False
        self._closed = False

    def run(self, key: ChoiceKey, state: RequestState) -> None:
        """Hand a choice over.

        Raises:
            Overloaded: The loop has not looked for long and the box is full.
        """
        with self._news:
            if len(self._runs) >= self._capacity:
                raise Overloaded("the worker takes no more requests now", retry_after_s=1.0)
            self._runs[key] = state
            self._news.notify()

    def drop(self, key: ChoiceKey) -> None:
        """Take a choice back, wherever it is by now."""
        with self._news:
            if self._runs.pop(key, None) is None:
                self._drops.add(key)
                self._news.notify()

    def flush(self) -> None:
        """Ask for the prefix cache to be emptied."""
        with self._news:
            self._flush = True
            self._news.notify()

    def close(self) -> None:
        """Make the loop end after its present step."""
        with self._news:
            self._closed = True
            self._news.notify()

    def take(self, *, wait: bool) -> Mail | None:
        """Empty the box; with `wait`, sleep until there is something in it. None: closed."""
        with self._news:
            while wait and not (self._runs or self._drops or self._flush or self._closed):
                self._news.wait()
            if self._closed:
                return None
            mail = Mail(
                runs=tuple(self._runs.items()), drops=frozenset(self._drops), flush=self._flush
            )
            self._runs.clear()
            self._drops.clear()
            self._flush = False
            return mail
