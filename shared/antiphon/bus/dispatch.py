"""Call the receivers of a subscription, isolating their errors."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING

from antiphon.wire.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon.bus.transport import Packet, PacketCallback

log = logging.getLogger(__name__)


def is_async(receive: Callable[..., Awaitable[None] | None]) -> bool:
    """Whether a receiver is a coroutine function, and so needs a task."""
    return inspect.iscoroutinefunction(receive)


def dispatch_sync(receive: PacketCallback, packet: Packet) -> None:
    """Call a plain function with a packet and log its errors, as `dispatch` does."""
    try:
        rest = receive(packet)
        assert rest is None, "a plain receiver has something to await"
    except EngineError as error:
        log.warning("receiver refused", extra={"subject": packet.subject, "code": error.code})
    except (Exception, asyncio.CancelledError):
        log.exception("receiver failed", extra={"subject": packet.subject})


async def dispatch(receive: PacketCallback, packet: Packet) -> None:
    """Call `receive` with a packet and log its errors: one message must not affect the others."""
    try:
        rest = receive(packet)
        if rest is not None:
            await rest
    except asyncio.CancelledError:
        if _being_cancelled():
            raise
        log.warning("receiver awaited what was cancelled", extra={"subject": packet.subject})
    except EngineError as error:
        log.warning("receiver refused", extra={"subject": packet.subject, "code": error.code})
    except Exception:
        log.exception("receiver failed", extra={"subject": packet.subject})


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
