"""The mailbox of the batching loop: choices to run and to drop, control commands, and the stop."""

from __future__ import annotations

import threading

import msgspec

from antiphon.model_worker.batching.media import MediaLoaded
from antiphon.model_worker.batching.page_transfers import TransferDone
from antiphon.model_worker.batching.state import ChoiceKey, RequestState
from antiphon.model_worker.grammar.matcher import GrammarMatcher
from antiphon.wire.command import ContinueWorker, FlushCache, PauseWorker, SetWeightVersion
from antiphon.wire.errors import Overloaded

ControlCommand = FlushCache | PauseWorker | ContinueWorker | SetWeightVersion
"""Operator commands to the loop. They are applied between two steps, in the order given."""

COMMANDS_MAX = 64
"""Maximum number of pending commands: the loop takes all of them before each step."""


class Mail(msgspec.Struct, kw_only=True):
    """Everything that was posted since the loop last looked.

    `runs` have the matcher of the choice's grammar, if it has one. `drops` have the number of
    outputs that are part of the response, or None where it is unknown.
    `landed` are transfers of pages, and loads of media, that have ended.
    `requeues` are the choices of requests that go to another worker if none of them was started.
    `tower` is the digest of the encoders' model, if it is another one now.
    """

    runs: dict[ChoiceKey, tuple[RequestState, GrammarMatcher | None]] = {}
    drops: dict[ChoiceKey, int | None] = {}
    requeues: dict[tuple[ChoiceKey, ...], None] = {}
    commands: list[ControlCommand] = []
    landed: list[TransferDone | MediaLoaded] = []
    tower: str | None = None

    def __bool__(self) -> bool:
        others = self.requeues or self.commands or self.landed or self.tower is not None
        return bool(self.runs or self.drops or others)


class Mailbox:
    """Passes mail from the event loop's thread to the batching loop's; neither waits.

    Bounded, though `drop` never raises: a choice dropped before it was taken just disappears, and
    the drops that remain name choices that the loop has.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._news = threading.Condition()
        self._mail = Mail()
        self._closed = False

    def run(
        self, key: ChoiceKey, state: RequestState, matcher: GrammarMatcher | None = None
    ) -> None:
        with self._news:
            if len(self._mail.runs) >= self._capacity:
                raise Overloaded("the worker accepts no more requests now", retry_after_s=1.0)
            self._mail.runs[key] = state, matcher
            self._news.notify()

    def drop(self, key: ChoiceKey, kept: int | None = None) -> None:
        """Drop a choice in whatever state it is; its response ends after `kept` outputs."""
        with self._news:
            if self._mail.runs.pop(key, None) is None:
                self._mail.drops[key] = kept
                self._news.notify()

    def requeue(self, keys: tuple[ChoiceKey, ...]) -> None:
        """Drop a request for another worker to run, unless it was started; see the step's report.

        Posting it again before the loop has looked has no effect.
        """
        with self._news:
            self._mail.requeues[keys] = None
            self._news.notify()

    def submit_command(self, command: ControlCommand) -> None:
        with self._news:
            if len(self._mail.commands) >= COMMANDS_MAX:
                text = "too many pending control commands; retry later"
                raise Overloaded(text, retry_after_s=1.0)
            self._mail.commands.append(command)
            self._news.notify()

    def land(self, done: TransferDone | MediaLoaded) -> None:
        """Report a transfer of pages or a load of media that has ended.

        The loop has started it, which bounds them.
        """
        with self._news:
            self._mail.landed.append(done)
            self._news.notify()

    def use_tower(self, tower: str) -> None:
        """Compute with the embeddings of this tower from here on."""
        with self._news:
            self._mail.tower = tower
            self._news.notify()

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify()

    @property
    def has_news(self) -> bool:
        """Whether `take` would return at once with mail, or with the end."""
        return self._closed or bool(self._mail)

    def take(self, *, wait: bool, timeout_s: float | None = None) -> Mail | None:
        """Take everything out, if `wait` after a sleep until there is something. None: closed."""
        if not (wait or self.has_news):
            return NOTHING  # without the lock: mail that arrives now is taken the next time
        with self._news:
            if wait:
                self._news.wait_for(lambda: self.has_news, timeout_s)
            if self._closed:
                return None
            if not self._mail:
                return NOTHING
            mail, self._mail = self._mail, Mail()
            return mail


NOTHING = Mail()
