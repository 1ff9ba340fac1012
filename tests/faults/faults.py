"""The faults: what is hit, how, and for how long."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from tests.faults.points import LONGER_POINTS, POINTS
from tests.faults.site import (
    DETOKENIZER,
    GATEWAY,
    HEARD_S,
    ITS_DETOKENIZER,
    LEADER,
    WORKER,
    go_on,
)
from tests.faults.streams import path_and_body
from tests.support.nats_link import Action, Apart, Share, passes
from tests.system.stack import heartbeats

from antiphon.wire.base import ProcessState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.faults.site import Fault, Site
    from tests.support.nats_link import LinkMessage
    from tests.system.stack import Stack

    from antiphon.wire.heartbeat import Heartbeat

RESTARTED_S = 60.0
"""Until a service that was stopped has finished what it may finish, and its successor is ready."""
SLOW_TOKENS = 1000
How = Literal["kill", "freeze"]
HOST = (WORKER, ITS_DETOKENIZER, "encoder-0", "kv_storage-0")
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
        pids = [site.pid(await site.strike(member)) for member in self.members]
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
        return await _for_a_time(site, Share(self.action, self.share), self.down_s)


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
        site.link.hold(await site.strike(self.member), sent=self.sent)
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
        one, other = [await site.strike(member) for member in self.members]
        return await _for_a_time(site, Apart(one, other), self.down_s)


async def _for_a_time(site: Site, rule: Callable[[LinkMessage], Action], down_s: float) -> int:
    """Let the link act by this rule; returns on how many messages it has."""
    before, site.link.rule = site.link.acted, rule
    await asyncio.sleep(down_s)
    site.link.rule = passes
    return site.link.acted - before


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Services are stopped as an operator does it, one after the other, and start again."""

    name: str
    members: tuple[str, ...]
    owner: bool = False

    async def happen(self, site: Site) -> int:
        for member in self.members:
            await _restart(site, await site.strike(member))
        return len(self.members)


async def _restart(site: Site, instance: str) -> None:
    url = site.stack.nats_url
    before = (await heartbeats(url, lambda beats: instance in beats, HEARD_S))[instance]
    os.kill(site.pid(instance), signal.SIGTERM)

    def is_back(beats: dict[str, Heartbeat]) -> bool:
        if (beat := beats.get(instance)) is None or beat.process == before.process:
            return False
        return beat.state is ProcessState.READY

    await heartbeats(url, is_back, RESTARTED_S)


@dataclass(frozen=True, kw_only=True)
class SlowClients:
    """Clients read nothing for a time, and then all: their streams are complete."""

    count: int
    down_s: float
    owner: bool = False

    @property
    def name(self) -> str:
        return f"{self.count} clients read nothing {self.down_s:g} s"

    async def happen(self, site: Site) -> int:
        path, body = path_and_body(site.stack.model, 0, SLOW_TOKENS)
        body |= {"logprobs": 5}
        site.struck = set()
        opened = [await _ask_slowly(site.stack, path, body) for _ in range(self.count)]
        await asyncio.sleep(self.down_s)
        received = await asyncio.gather(*(reader.read() for reader, _ in opened))
        for _, writer in opened:
            writer.close()
        ended = [b"data: [DONE]" in each and b'"error"' not in each for each in received]
        assert all(ended), f"{ended.count(False)} streams are not complete"
        return len(opened)


async def _ask_slowly(
    stack: Stack, path: str, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask with a receive buffer that a few tokens fill."""
    url = urllib.parse.urlsplit(stack.url)
    with socket.socket() as small:
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.setblocking(False)
        await asyncio.get_running_loop().sock_connect(small, (url.hostname, url.port))
        reader, writer = await asyncio.open_connection(sock=small.dup(), limit=1024)
    sent = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
    return reader, writer


SERVICES = (WORKER, DETOKENIZER, LEADER, "tokenizer-0", "kv_storage-0", GATEWAY)
PAIRS = (
    (WORKER, ITS_DETOKENIZER),
    (LEADER, WORKER),
    (LEADER, DETOKENIZER),
    (LEADER, GATEWAY),
    (DETOKENIZER, GATEWAY),
    ("scheduler-0", "scheduler-1"),
)
ROLLING = (
    *("worker-0", "worker-1", "scheduler-0", "scheduler-1", "tokenizer-0", "tokenizer-1"),
    *("detokenizer-0", "detokenizer-1", "encoder-0", "kv_storage-0"),
)
ACTIONS = (Action.DROP, Action.DUPLICATE, Action.DELAY, Action.REORDER)


def _of(member: str, how: How, down_s: float = 0.0) -> OfProcesses:
    name = f"{how} {member}" + (f" {down_s:g} s" if down_s else "")
    return OfProcesses(
        name=name, how=how, members=(member,), down_s=down_s, owner=member == GATEWAY
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
    BetweenTwo(members=PAIRS[0], down_s=3.0),
    Restart(name="restart the busy worker", members=(WORKER,)),
    SlowClients(count=4, down_s=3.0),
    *POINTS,
)
"""Each kind once."""
LONGER: Sequence[Fault] = (
    *(_of(member, "freeze", down_s) for member in SERVICES for down_s in (8.0, 30.0)),
    *(
        OfProcesses(name=f"freeze a host {down_s} s", how="freeze", members=HOST, down_s=down_s)
        for down_s in (3, 8, 30)
    ),
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
    BetweenTwo(members=PAIRS[0], down_s=8.0),
    *(BetweenTwo(members=members, down_s=down_s) for members in PAIRS[1:] for down_s in (3.0, 8.0)),
    Restart(name="restart all services but the gateway, one after the other", members=ROLLING),
    Restart(name="restart the gateway", members=(GATEWAY,), owner=True),
    SlowClients(count=16, down_s=30.0),
    *LONGER_POINTS,
)
"""The others."""
