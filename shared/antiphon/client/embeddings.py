"""Vectors of texts: a batch a call, a few at a time, asked again where an answer was lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from antiphon.bus.errors import BusDown, NoResponders, ReplyLost
from antiphon.wire.base import Usage
from antiphon.wire.errors import DeadlineExceeded
from antiphon.wire.routes import EMBED
from antiphon.wire.token_outputs import unpack_floats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.bus.bus import Bus
    from antiphon.wire.embed import EmbedReply, EmbedRequest

BATCH = 16
"""Texts of one call."""
CALLS_MAX = 4
"""Calls that wait for their answers at once."""
SILENCE_S = 60.0
"""After this long a call is made again: its answer may have been lost."""
PAUSE_S = 0.2
NO_RESPONDERS_TIMEOUT_S = 6.0
"""How long nobody may listen where somebody has: gateways need a while to find a broker again."""


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """What texts became, in their order: vectors, or a score for each of the labels."""

    vectors: list[Sequence[float]]
    labels: tuple[str, ...]
    usage: Usage


async def embed(bus: Bus, requests: Sequence[EmbedRequest], timeout_s: float) -> EmbedResult:
    """Return what all texts became.

    Raises:
        EngineError: Of the first call that failed; the others are given up.
    """
    deadline = _now() + timeout_s
    places = asyncio.Semaphore(CALLS_MAX)

    async def one(request: EmbedRequest) -> EmbedReply:
        async with places:
            return await _call(bus, request, deadline)

    try:
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(one(request)) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    replies = [call.result() for call in calls]
    return EmbedResult(
        [unpack_floats(vector) for reply in replies for vector in reply.vectors],
        replies[0].labels,
        Usage(
            prompt_tokens=sum(reply.usage.prompt_tokens for reply in replies),
            cached_tokens=sum(reply.usage.cached_tokens for reply in replies),
        ),
    )


async def _call(bus: Bus, request: EmbedRequest, deadline: float) -> EmbedReply:
    """Ask until there is an answer: whatever was lost, asking again is harmless."""
    tries, alone_since = 0, None
    while (left_s := deadline - _now()) > 0:
        tries += 1
        asked = msgspec.structs.replace(request, timeout_s=left_s)
        try:
            return await bus.call(
                EMBED, asked, timeout_s=min(left_s, SILENCE_S), model=request.model
            )
        except NoResponders:
            alone_since = _now() if alone_since is None else alone_since
            if tries == 1 or _now() - alone_since >= NO_RESPONDERS_TIMEOUT_S:
                raise
        except (ReplyLost, BusDown):
            alone_since = None
        except DeadlineExceeded:
            continue
        await asyncio.sleep(min(PAUSE_S, max(0.0, deadline - _now())))
    raise DeadlineExceeded("the vectors did not come in time")


def _now() -> float:
    return asyncio.get_running_loop().time()
