"""The name of this process on the bus: asked for before it is used, and given up when lost."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from antiphon.bus.errors import AnswerLost, BusDown, NobodyListens
from antiphon.service.endpoint import Answer
from antiphon.service.sockets import CannotStart
from antiphon.wire.base import Process
from antiphon.wire.errors import DeadlineExceeded, EngineError, Unavailable
from antiphon.wire.ids import Incarnation
from antiphon.wire.name import ClaimName, NameTaken
from antiphon.wire.routes import NAME

if TYPE_CHECKING:
    from antiphon.bus.transport import Subscription
    from antiphon.service.service import Runtime

log = logging.getLogger(__name__)

_UNKNOWN = Incarnation("unknown")


class Replaced(Exception):
    """Another process has taken this one's name while it was silent."""


class Name:
    """Holds the instance name of one process.

    Two live processes of one name would read each other's messages. So a process asks for its name
    before its first heartbeat, and leaves when another one got it while this one was frozen.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._instance = runtime.process.instance
        self._held: Subscription | None = None
        self._doubted = asyncio.Event()

    async def claim(self) -> None:
        """Take the name.

        Raises:
            CannotStart: A live process has it.
        """
        holder = await self._holder()
        if holder is not None:
            raise CannotStart(
                f"the name {self._instance} is taken by a live process "
                f"(incarnation {holder.incarnation}); choose another --instance, "
                "or another --cluster-name"
            )
        await self._hold()

    def doubt(self) -> None:
        """Ask anew soon: another process sent heartbeats under this name while we were silent."""
        self._doubted.set()

    async def keep(self) -> None:
        """Ask anew whenever there is doubt, until cancelled.

        Raises:
            Replaced: A live process answers under this name.
        """
        pause_s = self._runtime.settings.service.heartbeat_s
        while True:
            await self._doubted.wait()
            if self._held is not None:
                await self._held.drain()  # or we would answer ourselves
            holder = await self._holder()
            if holder is not None:
                raise Replaced(
                    f"the name {self._instance} was taken by another process "
                    f"(incarnation {holder.incarnation}) while this one was silent"
                )
            try:
                await self._hold()
            except Unavailable:
                if self._runtime.bus.link.up:
                    return  # draining: the name is not needed any more
            else:
                self._doubted.clear()
            await asyncio.sleep(pause_s)

    async def _holder(self) -> Process | None:
        """Return the live process that has the name; None if it is free.

        A holder that does not answer within the time after which it counts as dead has lost it.
        """
        settings = self._runtime.settings
        patience_s = settings.service.heartbeat_s * settings.scheduler.dead_beats
        claim = ClaimName(process=self._runtime.process)
        try:
            reply = await self._runtime.bus.call(
                NAME, claim, timeout_s=patience_s, instance=self._instance
            )
        except NobodyListens:
            return None
        except (DeadlineExceeded, BusDown, AnswerLost) as error:
            # Should there be one after all, the later of the two leaves by its heartbeats.
            log.warning("name not confirmed", extra={"code": error.code, "reason": error.message})
            return None
        except EngineError:
            return Process(instance=self._instance, incarnation=_UNKNOWN)  # too busy to say more
        return reply.process

    async def _hold(self) -> None:
        address = {"instance": str(self._instance)}
        answer = Answer(route=NAME, handler=self._answer, address=address, while_draining=True)
        self._held = await self._runtime.listen(answer)

    async def _answer(self, _: ClaimName, __: object) -> NameTaken:
        return NameTaken(process=self._runtime.process)
