"""Embeddings: one batch per call, a few calls at a time, with retries of lost replies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from antiphon.bus.errors import BusDown, NoResponders, ReplyLost
from antiphon.client.stream import NO_RESPONDERS_TIMEOUT_S, now
from antiphon.wire.base import Usage
from antiphon.wire.errors import DeadlineExceeded
from antiphon.wire.routes import EMBED
from antiphon.wire.token_outputs import unpack_floats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.bus.bus import Bus
    from antiphon.wire.generate import EmbedReply, EmbedRequest

BATCH = 16
"""Texts per call."""
CALLS_MAX = 4
"""Maximum concurrent calls."""
SILENCE_S = 60.0
"""Time after which a call is repeated: its reply may have been lost."""
PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """Embeddings in the order of the texts; or scores, one for each of the labels."""

    vectors: list[Sequence[float]]
    labels: tuple[str, ...]
    usage: Usage


async def embed(bus: Bus, requests: Sequence[EmbedRequest], timeout_s: float) -> EmbedResult:
    """Send the requests and join their replies; the first error cancels the other calls."""
    deadline = now() + timeout_s
    slots = asyncio.Semaphore(CALLS_MAX)

    async def one(request: EmbedRequest) -> EmbedReply:
        async with slots:
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
    """Retry until there is a reply: repeating an embedding request is harmless."""
    tries, no_responders_since = 0, None
    while (left_s := deadline - now()) > 0:
        tries += 1
        attempt = msgspec.structs.replace(request, timeout_s=left_s)
        try:
            return await bus.call(
                EMBED, attempt, timeout_s=min(left_s, SILENCE_S), model=request.model
            )
        except NoResponders:
            no_responders_since = now() if no_responders_since is None else no_responders_since
            if tries == 1 or now() - no_responders_since >= NO_RESPONDERS_TIMEOUT_S:
                raise
        except (ReplyLost, BusDown):
            no_responders_since = None
        except DeadlineExceeded:
            continue
        await asyncio.sleep(min(PAUSE_S, max(0.0, deadline - now())))
    raise DeadlineExceeded("no embeddings were received before the timeout")
