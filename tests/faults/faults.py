"""The faults: what is hit, how, and for how long."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tests.faults.points import LONGER_POINTS, POINTS
from tests.faults.site import DETOKENIZER, LEADER, WORKER, go_on
from tests.support.nats_link import Action, Apart, Share, passes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.faults.site import Fault, Site

How = Literal["kill", "freeze"]
HOST = (WORKER, DETOKENIZER, "encoder-0", "kv_storage-0")
"""What dies with the machine that a worker is on."""


@dataclass(frozen=True, kw_only=True)
class OfProcesses:
    """Processes are killed or frozen.

    Attributes:
        members: Instances of services, or the leading or busy one.
        down_s: How long they are frozen. A killed service is started again by the supervisor at
            once.
    """

    name: str
    how: How
    members: tuple[str, ...]
    down_s: float = 0.0
    owner: bool = False

    async def happen(self, site: Site) -> int:
        pids = [site.pid(await site.instance_of(member)) for member in self.members]
        number = signal.SIGKILL if self.how == "kill" else signal.SIGSTOP
        for pid in pids:
            os.kill(pid, number)
        if self.how == "freeze":
            await asyncio.sleep(self.down_s)
            for pid in pids:
                go_on(pid)
        return len(pids)


@dataclass(frozen=True, kw_only=True)
class OfBroker:
    """The broker is killed or frozen, and away for a time; `empty`: what it had stored is lost."""

    how: How
    down_s: float
    empty: bool = False
    owner: bool = False

    @property
    def name(self) -> str:
        return f"{self.how} broker {self.down_s:g} s" + (", its store lost" if self.empty else "")

    async def happen(self, site: Site) -> int:
        broker = site.broker
        if self.how == "freeze":
            await broker.pause()
            await asyncio.sleep(self.down_s)
            broker.resume()
            return 1
        await broker.kill()
        if self.empty:
            shutil.rmtree(broker.settings.store_path)
        await asyncio.sleep(self.down_s)
        await broker.start()
        return 1


@dataclass(frozen=True, kw_only=True)
class OfMessages:
    """A share of all messages that processes are sent is lost, repeated, delayed or reordered."""

    action: Action
    share: float
    down_s: float
    owner: bool = False

    @property
    def name(self) -> str:
        return f"{self.action} {self.share:.0%} of messages {self.down_s:g} s"

    async def happen(self, site: Site) -> int:
        before, site.link.rule = site.link.acted, Share(self.action, self.share)
        await asyncio.sleep(self.down_s)
        site.link.rule = passes
        return site.link.acted - before


@dataclass(frozen=True, kw_only=True)
class OneWay:
    """Nothing that a process sends comes to the broker, or nothing that it is sent comes to it."""

    member: str
    sent: bool
    down_s: float
    owner: bool = False

    @property
    def name(self) -> str:
        way = "from" if self.sent else "to"
        return f"nothing comes {way} {self.member} {self.down_s:g} s"

    async def happen(self, site: Site) -> int:
        before = site.link.acted
        site.link.hold(await site.instance_of(self.member), sent=self.sent)
        await asyncio.sleep(self.down_s)
        site.link.let_go()
        return site.link.acted - before


@dataclass(frozen=True, kw_only=True)
class BetweenTwo:
    """Two processes do not reach each other, and both reach all others."""

    members: tuple[str, str]
    down_s: float
    owner: bool = False

    @property
    def name(self) -> str:
        return f"{' and '.join(self.members)} apart {self.down_s:g} s"

    async def happen(self, site: Site) -> int:
        one, other = [await site.instance_of(member) for member in self.members]
        before, site.link.rule = site.link.acted, Apart(one, other)
        await asyncio.sleep(self.down_s)
        site.link.rule = passes
        return site.link.acted - before


SERVICES = (WORKER, DETOKENIZER, LEADER, "tokenizer-0", "kv_storage-0", "gateway-0")
PAIRS = (
    (WORKER, DETOKENIZER),
    (LEADER, WORKER),
    (LEADER, DETOKENIZER),
    (LEADER, "gateway-0"),
    (DETOKENIZER, "gateway-0"),
    ("scheduler-0", "scheduler-1"),
)
ACTIONS = (Action.DROP, Action.DUPLICATE, Action.DELAY, Action.REORDER)


def _of(member: str, how: How, down_s: float = 0.0) -> OfProcesses:
    name = f"{how} {member}" + (f" {down_s:g} s" if down_s else "")
    return OfProcesses(
        name=name, how=how, members=(member,), down_s=down_s, owner=member.startswith("gateway")
    )


EACH_KIND: Sequence[Fault] = (
    *(_of(member, "kill") for member in SERVICES),
    OfProcesses(name="kill a host", how="kill", members=HOST),
    OfBroker(how="kill", down_s=3.0),
    OfBroker(how="kill", down_s=0.3, empty=True),
    *(_of(member, "freeze", 3.0) for member in SERVICES),
    OfBroker(how="freeze", down_s=3.0),
    *(OfMessages(action=action, share=0.03, down_s=3.0) for action in ACTIONS),
    OneWay(member=WORKER, sent=True, down_s=3.0),
    OneWay(member=WORKER, sent=False, down_s=3.0),
    BetweenTwo(members=(WORKER, DETOKENIZER), down_s=3.0),
    *POINTS,
)
"""Each kind once."""
LONGER: Sequence[Fault] = (
    *(_of(member, "freeze", down_s) for member in SERVICES for down_s in (8.0, 30.0)),
    OfProcesses(name="freeze a host 8 s", how="freeze", members=HOST, down_s=8.0),
    OfProcesses(name="freeze a host 30 s", how="freeze", members=HOST, down_s=30.0),
    *(OfBroker(how="kill", down_s=down_s) for down_s in (0.3, 30.0)),
    *(OfBroker(how="freeze", down_s=down_s) for down_s in (8.0, 30.0)),
    *(
        OfMessages(action=action, share=share, down_s=8.0)
        for action in ACTIONS
        for share in (0.01, 0.05)
    ),
    *(
        OneWay(member=member, sent=sent, down_s=8.0)
        for member in (WORKER, DETOKENIZER, LEADER)
        for sent in (True, False)
    ),
    *(BetweenTwo(members=members, down_s=down_s) for members in PAIRS for down_s in (3.0, 8.0)),
    *LONGER_POINTS,
)
"""The others."""
