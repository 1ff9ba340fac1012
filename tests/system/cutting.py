"""Processes that are hit at a message: when all streams are open, however fast a machine is."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from tests.faults.placements import commands_in, read_message
from tests.support.nats import NatsServer
from tests.support.nats_link import Action, LinkMessage, NatsLink, linked, passes
from tests.system.stack import Stack, serving

from antiphon.wire.codec import id_count
from antiphon.wire.command import Admit
from antiphon.wire.routes import TEXT, TOKENS
from antiphon.wire.tokens import TokenBatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractContextManager

    from antiphon.wire.text import TextRow
    from antiphon.wire.tokens import TokenRow

T = TypeVar("T")
GATEWAY = "gateway-0"
WORKERS = ("worker-0", "worker-1")
DETOKENIZERS = ("detokenizer-0", "detokenizer-1")


@dataclass(frozen=True)
class LinkedStack:
    """A stack whose processes reach their broker through a link."""

    stack: Stack
    link: NatsLink

    @asynccontextmanager
    async def hitting(
        self,
        victims: Sequence[str],
        *,
        streams: int,
        choices: int | None = None,
        tokens: int = 0,
        fate: signal.Signals = signal.SIGKILL,
    ) -> AsyncIterator[Hit]:
        """Hit processes when all choices of these streams have begun, and none has ended.

        Workers get nothing until all requests have one, so that they run together.

        Args:
            victims: A worker, a detokenizer or the gateway, and others.
            streams: How many requests there will be.
            choices: How many choices they have together; None: one each.
            tokens: How many tokens these choices must have together.
            fate: What the processes are sent.

        Raises:
            AssertionError: It has not happened.
        """
        pids = {name: pid for name in victims if (pid := self.stack.pid(name)) is not None}
        assert len(pids) == len(victims), f"of {victims} only {list(pids)} live"
        hit = Hit(self.link, pids, streams, choices or streams, tokens, fate)
        self.link.rule = hit
        for worker in WORKERS:
            self.link.hold(worker, sent=False)
        try:
            yield hit
        finally:
            self.link.let_go()
            self.link.rule = passes
        assert hit.happened.is_set(), f"{len(hit.begun)} choices began, {hit.ended} ended"


@dataclass
class Hit:
    """The rule of a link: processes are hit at a message with tokens or text.

    A victim's own message is the last that passes of it: it has then no way to have finished. Of a
    gateway it is one that it has not read.
    """

    link: NatsLink
    pids: dict[str, int]
    streams: int
    choices: int
    tokens: int
    fate: signal.Signals
    admitted: set[str] = field(default_factory=set[str])
    begun: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    sent_tokens: int = 0
    ended: int = 0
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, message: LinkMessage) -> Action:
        if not message.sent or self.happened.is_set():
            return Action.PASS
        self._admit(message)
        owned = GATEWAY in self.pids
        of_text = owned or not self.pids.keys().isdisjoint(DETOKENIZERS)
        if not (self._read_text(message) if of_text else self._read_tokens(message)):
            return Action.PASS
        if self.ended or len(self.begun) < self.choices or self.sent_tokens < self.tokens:
            return Action.PASS
        if not owned and message.client not in self.pids:
            return Action.PASS
        for pid in self.pids.values():
            os.kill(pid, self.fate)
        self.happened.set()
        return Action.PASS if owned else Action.LAST

    def _admit(self, message: LinkMessage) -> None:
        if len(self.admitted) == self.streams:
            return
        admits = [command for command in commands_in(message) if isinstance(command, Admit)]
        self.admitted.update(admit.request_id for admit in admits)
        if len(self.admitted) == self.streams:
            self.link.let_go()

    def _read_tokens(self, message: LinkMessage) -> bool:
        """Whether these are tokens that a worker sends a detokenizer; if so, count them."""
        batch = read_message(TOKENS, message)
        if not isinstance(batch, TokenBatch):
            return False
        self.sent_tokens += len(batch.columns or ())
        for row in batch.rows:
            self._count(row, row.token_ids if row.offset >= 0 else b"")
        return True

    def _read_text(self, message: LinkMessage) -> bool:
        """Whether this is text that a detokenizer sends the gateway; if so, count its tokens."""
        batch = read_message(TEXT, message)
        if batch is None:
            return False
        for row in batch.rows:
            self._count(row, row.ids)
        return True

    def _count(self, row: TokenRow | TextRow, ids: bytes) -> None:
        self.sent_tokens += id_count(ids)
        self.ended += row.finish_reason is not None
        if ids:
            self.begun.add((row.request_id, row.choice))


@asynccontextmanager
async def linked_stack(*arguments: str) -> AsyncIterator[LinkedStack]:
    """A stack with a broker of its own."""
    async with (
        NatsServer(durable=True) as broker,
        linked(broker.url) as link,
        in_thread(serving("--bus-url", link.url, *arguments)) as stack,
    ):
        yield LinkedStack(stack, link)


@asynccontextmanager
async def in_thread(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave what takes a while, as a stack does, while the link goes on."""
    entered = await asyncio.to_thread(manager.__enter__)
    try:
        yield entered
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
