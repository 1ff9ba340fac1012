"""Where faults happen: a stack, its broker, and the link between them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tests.faults.placements import Placements
from tests.system.stack import heartbeats

from antiphon.wire.base import Role

if TYPE_CHECKING:
    from tests.support.nats import NatsServer
    from tests.support.nats_link import NatsLink
    from tests.system.stack import Stack

    from antiphon.wire.heartbeat import Heartbeat

MEMBERS = 2
"""Schedulers, tokenizers, workers and detokenizers, each."""
GATEWAY = "gateway-0"
LEADER = "the leading scheduler"
WORKER, DETOKENIZER = "the busy worker", "the busy detokenizer"
ITS_DETOKENIZER = "its detokenizer"
"""That of a worker that the fault hits, too."""
HEARD_S = 30.0
"""Until all have sent a heartbeat: one that has died often starts after a pause."""


class Fault(Protocol):
    """Something that happens to processes or messages.

    Attributes:
        owner: The gateway is hit: streams that it owns may end, each as a right beginning.
    """

    @property
    def name(self) -> str: ...

    @property
    def owner(self) -> bool: ...

    async def happen(self, site: Site) -> int:
        """Let it happen, and return when it is over: how many processes or messages it has hit."""
        ...


@dataclass
class Site:
    """A stack, and what a fault hits of it.

    Attributes:
        struck: The instances that the fault hits; None: messages of all, or their broker.
    """

    stack: Stack
    broker: NatsServer
    link: NatsLink
    struck: set[str] | None = None
    placements: Placements = field(default_factory=Placements)

    def __post_init__(self) -> None:
        self.link.watch = self.placements

    def hits(self, placed: tuple[str, ...]) -> bool:
        """Whether the fault hits the gateway, or one of the instances that serve a request."""
        return self.struck is None or not self.struck.isdisjoint({GATEWAY, *placed})

    async def strike(self, member: str) -> str:
        """The instance that a member is now, which is then one that the fault hits."""
        instance = await self.instance_of(member)
        self.struck = (self.struck or set()) | {instance}
        return instance

    async def instance_of(self, member: str) -> str:
        """The instance that a member is now: the one that leads, or has most requests."""
        if member == ITS_DETOKENIZER:
            found = map(self.placements.detokenizer_of, self.struck or ())
            return next(each for each in found if each is not None)
        roles = {LEADER: Role.SCHEDULER, WORKER: Role.WORKER, DETOKENIZER: Role.DETOKENIZER}
        if (role := roles.get(member)) is None:
            return member

        def all_heard(beats: dict[str, Heartbeat]) -> bool:
            found = [beat for beat in beats.values() if beat.role is role]
            return len(found) == MEMBERS and (member != LEADER or any(b.leads for b in found))

        beats = await heartbeats(self.stack.nats_url, all_heard, HEARD_S)
        of_role = {name: beat for name, beat in beats.items() if beat.role is role}
        return max(of_role, key=lambda name: (of_role[name].leads is not None, of_role[name].load))

    def pid(self, instance: str) -> int:
        """The pid of an instance, which must live."""
        pid = self.stack.pid(instance)
        assert pid is not None, f"{instance} does not live"
        return pid


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def go_on(pid: int) -> None:
    """Let a stopped process run, unless the supervisor has given it up."""
    if lives(pid):
        os.kill(pid, signal.SIGCONT)
