"""The instance name of this process: claimed before use, and given up when lost."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from antiphon.bus.transport import BusDown, NoResponders, ReplyLost, Subscription
from antiphon.service.endpoint import RequestEndpoint
from antiphon.service.startup import CannotStart
from antiphon.wire.base import Process
from antiphon.wire.errors import DeadlineExceeded, EngineError, Unavailable
from antiphon.wire.heartbeat import ClaimName, NameTaken
from antiphon.wire.ids import Incarnation
from antiphon.wire.routes import NAME

if TYPE_CHECKING:
    from antiphon.service.service import Runtime

log = logging.getLogger(__name__)


class Replaced(Exception):
    """Another process has taken over this one's name."""


class InstanceName:
    """Holds the instance name of one process.

    Two live processes with one name would receive each other's messages. So a process claims its
    name before its first heartbeat, and exits if another one took it while this one was frozen.

    Two processes that start at the same time may both find the name free. So each claims it again
    once it responds to claims. The broker puts these claims in one order. A holder that receives a
    later claim than its own checks again, finds the claimant, and exits: the last one stays. If it
    finds none, as after a forged claim, it stays itself.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._instance = runtime.process.instance
        self._subscription: Subscription | None = None
        self._claimed = False  # our claim has passed the broker: claims from now on are later
        self._recheck_requested = asyncio.Event()

    async def claim(self) -> None:
        """Claim the name; raises `CannotStart` if a live process has it."""
        holder = await self._find_holder()
        if holder is not None:
            raise CannotStart(
                f"the name {self._instance} is taken by a live process "
                f"(incarnation {holder.incarnation}); choose another --instance, "
                "or another --cluster-name"
            )
        await self._listen_and_claim()

    def recheck(self) -> None:
        self._recheck_requested.set()

    async def watch(self) -> None:
        """Check the name whenever `recheck` was called; raises `Replaced` once it is lost."""
        pause_s = self._runtime.settings.service.heartbeat_s
        while True:
            await self._recheck_requested.wait()
            if self._subscription is not None:
                await self._subscription.drain()  # or we would reply to our own claim
            holder = await self._find_holder()
            if holder is not None:
                raise Replaced(
                    f"the name {self._instance} was taken by another process "
                    f"(incarnation {holder.incarnation}), which was started at the same time, or "
                    "while this one did not respond; choose another --instance for one of them"
                )
            self._recheck_requested.clear()
            try:
                await self._listen_and_claim()
            except Unavailable:
                if self._runtime.bus.link.up:
                    return  # draining: the name is not needed any more
                self.recheck()
            # Jitter: two processes that check at the same time must not stay in lockstep.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  # no secret

    async def _find_holder(self) -> Process | None:
        """Return the live process that has the name; None if it is free."""
        # A holder that does not reply within the time after which it counts as dead has lost it.
        try:
            reply = await self._send_claim(held=False)
        except NoResponders:
            return None
        except (DeadlineExceeded, BusDown, ReplyLost) as error:
            # If there is a holder after all, it exits when it receives our second claim.
            log.warning("name not confirmed", extra={"code": error.code, "reason": error.message})
            return None
        except EngineError:
            # A holder that is overloaded or draining does not name itself.
            return Process(instance=self._instance, incarnation=Incarnation("unknown"))
        return reply.process

    async def _listen_and_claim(self) -> None:
        """Respond to claims of the name, and claim it from other holders."""
        address = {"instance": str(self._instance)}
        answer = RequestEndpoint(
            route=NAME, handler=self._on_claim, address=address, while_draining=True
        )
        self._claimed = False
        self._subscription = await self._runtime.listen(answer)
        try:
            await self._send_claim(held=True)
        except EngineError as error:
            log.warning("name not confirmed", extra={"code": error.code, "reason": error.message})
            self.recheck()

    async def _send_claim(self, *, held: bool) -> NameTaken:
        settings = self._runtime.settings
        dead_s = settings.service.heartbeat_s * settings.scheduler.dead_beats
        claim = ClaimName(process=self._runtime.process, held=held)
        return await self._runtime.bus.call(NAME, claim, timeout_s=dead_s, instance=self._instance)

    async def _on_claim(self, claim: ClaimName, __: object) -> NameTaken:
        if claim.process == self._runtime.process:
            self._claimed = True
        elif claim.held and self._claimed:
            self.recheck()
        return NameTaken(process=self._runtime.process)
