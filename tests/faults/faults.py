"""The faults: which processes are hit, how, and for how long."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tests.system.stack import heartbeats

from antiphon.wire.base import Role

if TYPE_CHECKING:
    from tests.support.nats import NatsServer
    from tests.system.stack import Stack

    from antiphon.wire.heartbeat import Heartbeat

How = Literal["kill", "freeze"]
MEMBERS = 2
"""Schedulers, tokenizers, workers and detokenizers, each."""
LEADER = "the leading scheduler"
WORKER, DETOKENIZER = "the busy worker", "the busy detokenizer"
HOST = (WORKER, DETOKENIZER, "encoder-0", "kv_storage-0")
"""What dies with the machine that a worker is on."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to processes.

    Attributes:
        members: Instances of services, or the leading or busy one; none: the broker.
        down_s: How long a process is frozen, or the broker is away. A killed service is started
            again by the supervisor at once.
        owner: The gateway is hit: streams that it owns may end, each as a right beginning.
    """

    name: str
    how: How
    members: tuple[str, ...] = ()
    down_s: float = 0.0
    owner: bool = False

    async def happen(self, stack: Stack, broker: NatsServer) -> None:
        """Let it happen, and return when it is over."""
        if not self.members:
            await self._to_broker(broker)
            return
        members = [await instance_of(stack, member) for member in self.members]
        pids = [stack.pid(member) for member in members]
        assert None not in pids, f"{self.name}: {self.members} do not all live"
        number = signal.SIGKILL if self.how == "kill" else signal.SIGSTOP
        for pid in pids:
            os.kill(pid or 0, number)
        if self.how == "freeze":
            await asyncio.sleep(self.down_s)
            for pid in pids:
                if _lives(pid or 0):  # the supervisor may have given it up
                    os.kill(pid or 0, signal.SIGCONT)

    async def _to_broker(self, broker: NatsServer) -> None:
        if self.how == "freeze":
            await broker.pause()
            await asyncio.sleep(self.down_s)
            broker.resume()
            return
        await broker.kill()
        await asyncio.sleep(self.down_s)
        await broker.start()


async def instance_of(stack: Stack, member: str) -> str:
    """The instance that a member is now: the one that leads, or has most requests of its role."""
    roles = {LEADER: Role.SCHEDULER, WORKER: Role.WORKER, DETOKENIZER: Role.DETOKENIZER}
    if (role := roles.get(member)) is None:
        return member

    def all_heard(beats: dict[str, Heartbeat]) -> bool:
        found = [beat for beat in beats.values() if beat.role is role]
        return len(found) == MEMBERS and (member != LEADER or any(b.leads for b in found))

    beats = await heartbeats(stack.nats_url, all_heard)
    of_role = {name: beat for name, beat in beats.items() if beat.role is role}
    return max(of_role, key=lambda name: (of_role[name].leads is not None, of_role[name].load))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


SERVICES = (WORKER, DETOKENIZER, LEADER, "tokenizer-0", "kv_storage-0", "gateway-0")


def _of(member: str, how: How, down_s: float = 0.0) -> Fault:
    name = f"{how} {member}" + (f" {down_s:g} s" if down_s else "")
    return Fault(
        name=name, how=how, members=(member,), down_s=down_s, owner=member.startswith("gateway")
    )


def _broker(how: How, down_s: float) -> Fault:
    return Fault(name=f"{how} broker {down_s:g} s", how=how, down_s=down_s)


EACH_KIND = (
    *(_of(member, "kill") for member in SERVICES),
    Fault(name="kill a host", how="kill", members=HOST),
    _broker("kill", 3.0),
    *(_of(member, "freeze", 3.0) for member in SERVICES),
    _broker("freeze", 3.0),
)
"""Each kind once."""
LONGER = (
    *(_of(member, "freeze", down_s) for member in SERVICES for down_s in (8.0, 30.0)),
    Fault(name="freeze a host 8 s", how="freeze", members=HOST, down_s=8.0),
    Fault(name="freeze a host 30 s", how="freeze", members=HOST, down_s=30.0),
    *(_broker("kill", down_s) for down_s in (0.3, 30.0)),
    *(_broker("freeze", down_s) for down_s in (8.0, 30.0)),
)
"""The others."""
