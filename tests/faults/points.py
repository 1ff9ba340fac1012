"""Named points: a process is hit when a message that marks the point passes the link.

So the services need no hooks for it, and the point is the same whatever else the machine does.
"""

from __future__ import annotations

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import aiohttp
from tests.faults.placements import commands_in, read_message
from tests.faults.site import DETOKENIZER, LEADER, WORKER, go_on
from tests.faults.streams import path_and_body
from tests.support.nats_link import Action, LinkMessage, passes

from antiphon.wire.command import Admit
from antiphon.wire.routes import CANCEL, SUBMIT, TOKENS
from antiphon.wire.tokens import TokenBatch

if TYPE_CHECKING:
    from tests.faults.site import Site

    from antiphon.wire.submit import SubmitRequest

REACHED_S = 60.0
"""Within this time the load comes to each point."""


@dataclass(frozen=True, kw_only=True)
class Point(ABC):
    """A process is hit at a named point.

    Attributes:
        frozen_s: How long it is frozen; 0: it is killed.
    """

    at: ClassVar[str]
    member: str
    frozen_s: float = 0.0
    owner: bool = False

    @property
    def name(self) -> str:
        how = f"freeze {self.frozen_s:g} s" if self.frozen_s else "kill"
        return f"{self.at}: {how} {self.member}"

    @abstractmethod
    def reached(self, message: LinkMessage, instance: str) -> Action | None:
        """Return what is done with the message that marks the point, or None for any other.

        The client of that message is hit. `instance` is what the member was when the load was led
        to the point; a leader may have lost its lead since.
        """

    async def lead_to(self, site: Site, instance: str) -> None:  # noqa: B027  # most need nothing
        """Do what brings the load to the point."""

    async def happen(self, site: Site) -> int:
        instance = await site.strike(self.member)
        reached: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

        def rule(message: LinkMessage) -> Action:
            if reached.done():
                return Action.PASS
            action = self.reached(message, instance)
            if action is not None:
                pid = site.pid(message.client)
                os.kill(pid, signal.SIGSTOP if self.frozen_s else signal.SIGKILL)
                reached.set_result((message.client, pid))
            return action or Action.PASS

        site.link.rule = rule
        try:
            await self.lead_to(site, instance)
            async with asyncio.timeout(REACHED_S):
                hit, pid = await reached
        finally:
            site.link.rule = passes
        site.struck = (site.struck or set()) | {hit}
        if self.frozen_s:
            await asyncio.sleep(self.frozen_s)
            go_on(pid)
            site.link.cut(hit)  # of its connection one direction may have ended
        return 1


class BeforeLastTokens(Point):
    """The worker has finished a choice; its last tokens are lost with the detokenizer."""

    at = "after finish, before text"

    def reached(self, message: LinkMessage, instance: str) -> Action | None:
        ours = not message.sent and message.client == instance
        return Action.DROP if ours and _finishes(message) else None


class AfterLastTokens(Point):
    """The worker has sent the last tokens of a choice, and nothing after them."""

    at = "just after finish"

    def reached(self, message: LinkMessage, instance: str) -> Action | None:
        ours = message.sent and message.client == instance
        return Action.LAST if ours and _finishes(message) else None


class InPrefill(Point):
    """The worker has been sent a request, and computes its prompt."""

    at = "in prefill"

    def reached(self, message: LinkMessage, instance: str) -> Action | None:
        ours = not message.sent and message.client == instance
        return Action.PASS if ours and any(_admits(message)) else None


class AfterSeal(Point):
    """A worker has died, and the leader has what its detokenizer had accepted.

    Only the leader admits, so its message needs no check of the sender.
    """

    at = "after seal, before admit"

    async def lead_to(self, site: Site, instance: str) -> None:
        """Kill a worker as its tokens come to a detokenizer: only then is anything continued."""
        worker, marked = await site.strike(WORKER), site.link.rule
        pid, killed = site.pid(worker), asyncio.Event()

        def rule(message: LinkMessage) -> Action:
            if not killed.is_set() and not message.sent and _streams(message, worker):
                os.kill(pid, signal.SIGKILL)
                killed.set()
            return marked(message)

        site.link.rule = rule
        async with asyncio.timeout(REACHED_S):
            await killed.wait()

    def reached(self, message: LinkMessage, instance: str) -> Action | None:
        continues = any(admit.continues is not None for admit in _admits(message))
        return Action.NONE_MORE if message.sent and continues else None


class AfterAccept(Point):
    """The leader, which alone accepts requests, has accepted one, and no worker has it."""

    at = "after accept, before bind"

    def reached(self, message: LinkMessage, instance: str) -> Action | None:
        accepts = ".inbox." in message.subject and b"SubmitAccepted" in message.payload
        return Action.LAST if message.sent and accepts else None


class AfterReconnect(Point):
    """A process has connected again, and no other one knows it yet."""

    at = "between reconnect and the first heartbeat"

    async def lead_to(self, site: Site, instance: str) -> None:
        site.link.cut(instance)

    def reached(self, message: LinkMessage, instance: str) -> Action | None:
        ours = message.sent and message.client == instance
        beats = ours and ".heartbeat." in message.subject
        return Action.NONE_MORE if beats else None


TOKENS_OF_CANCELLED = 251
"""No other request has this limit."""


@dataclass(frozen=True, kw_only=True)
class CancelBeforeSubmit:
    """A client is gone before its request has reached the leader, which gets the cancel first."""

    name: str = "cancel before submit"
    owner: bool = False

    async def happen(self, site: Site) -> int:
        site.struck = set()
        seen = _Cancelled()
        site.link.rule = seen
        path, body = path_and_body(site.stack.model, 0, TOKENS_OF_CANCELLED)
        try:
            async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
                asking = group.create_task(_ask(session, site.stack.url + path, body))
                async with asyncio.timeout(REACHED_S):
                    await seen.submitted.wait()
                asking.cancel()
            async with asyncio.timeout(REACHED_S):
                await seen.cancelled.wait()
        finally:
            site.link.rule = passes
            site.link.release()
        return 1


@dataclass
class _Cancelled:
    """The rule that lets the cancel of a request overtake it."""

    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    _request: str = ""

    def __call__(self, message: LinkMessage) -> Action:
        if message.sent or not self._of_it(message):
            return Action.PASS
        if message.subject.endswith(".submit"):
            self.submitted.set()
            return Action.PASS if self.cancelled.is_set() else Action.KEEP
        self.cancelled.set()
        return Action.PASS

    def _of_it(self, message: LinkMessage) -> bool:
        submit: SubmitRequest | None = read_message(SUBMIT, message)
        if submit is not None and submit.sampling.max_new_tokens == TOKENS_OF_CANCELLED:
            self._request = submit.request_id
            return True
        cancel = read_message(CANCEL, message)
        return cancel is not None and cancel.request_id == self._request


async def _ask(session: aiohttp.ClientSession, url: str, body: object) -> None:
    async with session.post(url, json=body) as response:
        await response.read()


def _finishes(message: LinkMessage) -> bool:
    """Whether these are the last tokens of a choice."""
    batch = read_message(TOKENS, message)
    return isinstance(batch, TokenBatch) and any(row.finish_reason for row in batch.rows)


def _streams(message: LinkMessage, worker: str) -> bool:
    """Whether these are tokens of a worker's, of a choice that has more to come."""
    batch = read_message(TOKENS, message)
    if not isinstance(batch, TokenBatch) or batch.worker.instance != worker:
        return False
    return any(not row.finish_reason for row in batch.rows)


def _admits(message: LinkMessage) -> list[Admit]:
    return [command for command in commands_in(message) if isinstance(command, Admit)]


OF_REQUESTS = (
    *((InPrefill, WORKER), (AfterLastTokens, WORKER), (BeforeLastTokens, DETOKENIZER)),
    *((AfterSeal, LEADER), (AfterAccept, LEADER)),
)
POINTS = (
    *(kind(member=member) for kind, member in OF_REQUESTS),
    AfterReconnect(member=WORKER),
    CancelBeforeSubmit(),
)
LONGER_POINTS = (
    *(kind(member=member, frozen_s=8.0) for kind, member in OF_REQUESTS),
    *(AfterReconnect(member=member) for member in (LEADER, DETOKENIZER)),
    *(AfterReconnect(member=member, frozen_s=8.0) for member in (WORKER, LEADER, DETOKENIZER)),
)
