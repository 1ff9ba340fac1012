"""POST /v1/chat/completions and /v1/completions: one answer over one connection."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from antiphon.gateway.http import sse
from antiphon.gateway.http.errors import envelope
from antiphon.gateway.http.openai import read_chat, read_completion
from antiphon.gateway.http.replies import ChatVoice, CompletionVoice, Spoken
from antiphon.gateway.http.server import BEGUN, REQUEST_ID, read_json
from antiphon.gateway.owner.actions import Ended, Finished, Said
from antiphon.gateway.stream import check

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from antiphon.gateway.driver import Driver
    from antiphon.gateway.entrance import Entrance
    from antiphon.gateway.http.openai import Posted
    from antiphon.gateway.http.replies import Voice
    from antiphon.gateway.metrics import GatewayMetrics
    from antiphon.gateway.owner.actions import StreamEvent
    from antiphon.gateway.stream import Stream
    from antiphon.wire.ids import ModelName

_LAST_WORDS_S = 10.0
"""How long a client may take for what is left once its request has ended."""


class Completions:
    """Holds each connection until its answer is told, or its client is gone."""

    def __init__(
        self,
        entrance: Entrance,
        driver: Driver,
        metrics: GatewayMetrics,
        model: ModelName,
        body_bytes_max: int,
    ) -> None:
        self._entrance = entrance
        self._driver = driver
        self._metrics = metrics
        self._model = model
        self._body_bytes_max = body_bytes_max

    def routes(self) -> list[web.RouteDef]:
        """Both kinds of completion."""
        return [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._complete),
        ]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_chat, ChatVoice)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_completion, CompletionVoice)

    async def _answer(
        self, request: web.Request, read: Callable[[bytes], Posted], kind: type[Voice]
    ) -> web.StreamResponse:
        with self._metrics.refusals():
            posted = read(await read_json(request, self._body_bytes_max))
        self._metrics.unknown_fields.inc(posted.fields_unknown)
        ask = msgspec.structs.replace(posted.ask, traceparent=request.headers.get("traceparent"))
        stream = await self._entrance.enter(ask)
        request[REQUEST_ID] = stream.submit.request_id
        try:
            voice = kind(
                ask.key or stream.submit.request_id,
                int(time.time()),
                self._model,
                choices=ask.choices,
                usage_always=posted.continuous_usage,
            )
            if posted.stream:
                return await self._tell(request, stream, voice, usage=posted.include_usage)
            return await self._tell_whole(stream, voice)
        finally:
            # Reached by cancellation too, when the connection is lost.
            self._entrance.leave(stream)

    async def _tell_whole(self, stream: Stream, voice: Voice) -> web.Response:
        choices = [Spoken([]) for _ in range(stream.submit.choices)]
        while stream.ended is None or stream.waiting:
            for event in await stream.take():
                self._collect(stream, event, choices)
        if stream.ended.error is not None:
            raise stream.ended.error
        body = voice.whole(choices, stream.ended.usage)
        return web.Response(body=body, content_type="application/json", headers=_named(stream))

    def _collect(self, stream: Stream, event: StreamEvent, choices: list[Spoken]) -> None:
        if isinstance(event, Said):
            choices[event.choice].said.append(event)
            self._driver.read(stream, event)
        elif isinstance(event, Finished):
            choices[event.choice].finished = event

    async def _tell(
        self, request: web.Request, stream: Stream, voice: Voice, *, usage: bool
    ) -> web.StreamResponse:
        """Write events as they come. What fails before the first one has a status of its own."""
        events = await self._some(stream)
        check(events)
        response = web.StreamResponse(headers=sse.HEADERS | _named(stream))
        request[BEGUN] = True
        try:
            async with asyncio.timeout(None) as patience:
                with _limit(stream, patience):
                    await response.prepare(request)
                    await response.write(voice.begin() + _written(events, voice, usage=usage))
                    while not isinstance(events[-1], Ended):
                        self._count(stream, events)
                        events = await self._some(stream)
                        await response.write(_written(events, voice, usage=usage))
                    await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client left; cancelling is up to the caller, as for every way to leave
        return response

    async def _some(self, stream: Stream) -> list[StreamEvent]:
        """Wait for something that the client hears of."""
        while True:
            events = [e for e in await stream.take() if isinstance(e, Said | Finished | Ended)]
            if events:
                return list(events)

    def _count(self, stream: Stream, events: list[StreamEvent]) -> None:
        for event in events:
            if isinstance(event, Said):
                self._driver.read(stream, event)


def _written(events: list[StreamEvent], voice: Voice, *, usage: bool) -> bytes:
    """Put all that waits into one piece: one write, however many steps have passed."""
    told = voice.chunks(event for event in events if isinstance(event, Said | Finished))
    end = events[-1]
    if not isinstance(end, Ended):
        return told
    if end.error is not None:
        return told + sse.event(msgspec.json.encode(envelope(end.error))) + sse.DONE
    return told + (voice.usage(end.usage) if usage else b"") + sse.DONE


@contextmanager
def _limit(stream: Stream, patience: asyncio.Timeout) -> Generator[None]:
    """Once the request has ended, do not wait for ever for a client that has stopped reading."""

    def ended() -> None:
        patience.reschedule(asyncio.get_running_loop().time() + _LAST_WORDS_S)

    if stream.ended is not None:
        ended()
    stream.on_end = ended
    try:
        yield
    finally:
        stream.on_end = None


def _named(stream: Stream) -> dict[str, str]:
    return {"X-Request-Id": stream.submit.request_id}
