"""A real stack under 100,000 hostile messages: no process dies, and no stream is hurt."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.fuzz.forger import Forger, Known
from tests.support.services import client_bus
from tests.support.wait import until
from tests.system.stack import SERVICES, Stack, serving

from antiphon.bus.nats import NatsTransport
from antiphon.client import Client
from antiphon.config.settings import BusConfig
from antiphon.wire.ids import ClusterName
from antiphon.wire.routes import HEARTBEAT, OPEN
from antiphon.wire.submit import OpenList

if TYPE_CHECKING:
    from antiphon.bus.bus import Bus, Delivery

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

MESSAGES = int(os.environ.get("ANTIPHON_FUZZ_MESSAGES", "100000"))  # noqa: TID251  # a test's own
_SEED = int(os.environ.get("ANTIPHON_FUZZ_SEED", "0"))  # noqa: TID251  # a test's own
SEED = _SEED or random.SystemRandom().randrange(1, 2**32)
"""Of a run, printed by it; `ANTIPHON_FUZZ_SEED` repeats one."""
STREAMS = 16
CHUNK = 50
"""Messages between two looks at the stack."""


class Attack:
    """Streams, health and processes of one stack while it is sent forged messages."""

    def __init__(self, stack: Stack, bus: Bus, client: Client) -> None:
        self.stack = stack
        self.bus = bus
        self.client = client
        self.known = Known(stack.model)
        self.hurt: list[str] = []
        self.answers = 0
        self.unhealthy: list[int] = []
        self.done = asyncio.Event()

    async def learn(self) -> None:
        """Listen until every process has been met."""
        await self.bus.listen(HEARTBEAT, self._beat)
        await self.bus.listen(OPEN, self._opened, model=self.stack.model)
        await until(lambda: len(self.known.processes) == len(SERVICES), timeout_s=30)

    async def send(self, seed: int) -> None:
        """Publish all messages; the stack has a moment after each chunk."""
        forger, prefix = Forger(seed, self.known), f"{self.bus.cluster}.v1."
        for number in range(MESSAGES):
            forged = forger.next()
            reply = None if forged.reply is None else prefix + forged.reply
            self.bus.transport.publish(prefix + forged.subject, forged.payload, reply)
            if number % CHUNK == 0:
                await asyncio.sleep(0.02)
        self.done.set()

    async def streams(self, text: str) -> None:
        """Ask the same again and again; the text must be the same each time."""
        while not self.done.is_set():
            try:
                pieces = self.client.generate(
                    self.stack.model, PROMPT, timeout_s=60, temperature=0.0, max_tokens=200
                )
                said = "".join([piece.text async for piece in pieces])
            except Exception as error:  # noqa: BLE001  # each is a hurt stream
                self.hurt.append(f"{time.monotonic():.1f} {type(error).__name__}: {error}")
            else:
                self.answers += 1
                if said != text:
                    self.hurt.append(f"another text: {said!r}")

    async def health(self) -> None:
        """Look at the gateway's health, twice a second."""
        async with httpx.AsyncClient(timeout=10) as http:
            while not self.done.is_set():
                status = (await http.get(f"{self.stack.url}/health")).status_code
                if status != 200:
                    self.unhealthy.append(status)
                await asyncio.sleep(0.5)

    def _beat(self, delivery: Delivery) -> None:
        if self.done.is_set() or len(self.known.processes) == len(SERVICES):
            return  # from here on some are forged
        beat = delivery.read(HEARTBEAT)
        self.known.processes[str(beat.role)] = beat.process
        self.known.config_digest = beat.config_digest

    def _opened(self, delivery: Delivery) -> None:
        try:
            message = delivery.read(OPEN)
        except Exception:  # noqa: BLE001  # one of our own
            return
        if message.owner == self.known.processes.get("gateway") and isinstance(message, OpenList):
            opened = [line.request_id for line in message.opened]
            before = [] if message.whole else self.known.live
            self.known.live = [each for each in before + opened if each not in message.closed]


PROMPT = "Count from 1 to 30."


async def test_stack_survives_hostile_messages_beside_streams() -> None:
    print(f"ANTIPHON_FUZZ_SEED={SEED} ANTIPHON_FUZZ_MESSAGES={MESSAGES}")
    with serving() as stack:
        before = stack.pids()
        assert set(before) == set(SERVICES)
        transport = NatsTransport(BusConfig(url=stack.nats_url), name="fuzz")
        async with (
            client_bus(transport, "fuzz", cluster=ClusterName("antiphon")) as bus,
            Client(stack.nats_url) as client,
        ):
            attack = Attack(stack, bus, client)
            await attack.learn()
            answer = await client.complete(stack.model, PROMPT, temperature=0.0, max_tokens=200)
            async with asyncio.TaskGroup() as group:
                for _ in range(STREAMS):
                    group.create_task(attack.streams(answer.text))
                group.create_task(attack.health())
                group.create_task(attack.send(SEED))
            after = await client.complete(stack.model, PROMPT, temperature=0.0, max_tokens=200)
        assert stack.pids() == before, f"seed {SEED}: a process died"
        print(f"{attack.answers} answers")
        assert attack.hurt == [], f"seed {SEED}"
        assert attack.unhealthy == [], f"seed {SEED}"
        assert after.text == answer.text
        assert attack.answers >= STREAMS
