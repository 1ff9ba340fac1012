"""The one way from a body to an answer: enter, listen, and tell it by the voice of a family.

A family of APIs is a folder beside this file. It has `operations()`, each a path with the struct of
its body; a reader, which makes a body an `Ask`; and a `Voice`, which writes what is said. How it
shows errors is a line in `errors.py`. It never talks to the bus, and it never writes to a client.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web

from antiphon.gateway.chorus import Answer, Chorus
from antiphon.gateway.http.guard import tenant_of
from antiphon.gateway.http.limits import LOOP_ANSWER_BYTES
from antiphon.gateway.http.server import BEGUN, REQUEST_ID, read_json, warn
from antiphon.gateway.http.sse import CONTENT_TYPE
from antiphon.gateway.owner.actions import Said
from antiphon.gateway.together import together
from antiphon.wire.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence

    from antiphon.gateway.ask import Ask
    from antiphon.gateway.chorus import Heard
    from antiphon.gateway.driver import Driver
    from antiphon.gateway.entrance import Entrance
    from antiphon.gateway.http.body_reader import BodyReader
    from antiphon.gateway.http.detached import Detached
    from antiphon.gateway.http.fields import Refused
    from antiphon.gateway.http.keepalive import Keepalive, Silence
    from antiphon.gateway.http.voice import Voice
    from antiphon.gateway.metrics import GatewayMetrics
    from antiphon.gateway.stream import Stream

    Taken = list[tuple[int, list[Heard]]]
    VoiceOf = Callable[[Sequence[Stream]], Awaitable[Voice]]
    Write = Callable[[bytes], Awaitable[None]]

log = logging.getLogger(__name__)

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

_NONE: Mapping[str, Refused] = {}
_GRAMMAR = "grammar"
"""What an engine calls a grammar that has a mistake; the client called it otherwise."""
_PROMPT = ("prompt", "messages")
"""What a tokenizer calls a text that is too long."""
_NAME_SHOWN = 100
"""How much of the name of an unknown field is shown."""
_LAST_WORDS_S = 10.0
"""How long a client may take for what is left once its requests have ended."""

_STREAM = {
    "Cache-Control": "no-cache",
    # Tells nginx to pass each event on as it comes.
    "X-Accel-Buffering": "no",
}


class Answering:
    """Holds each connection until its answer is told, or its client is gone."""

    def __init__(
        self,
        entrance: Entrance,
        driver: Driver,
        metrics: GatewayMetrics,
        detached: Detached,
        keepalive: Keepalive,
        bodies: BodyReader,
        body_bytes_max: int,
    ) -> None:
        self._entrance = entrance
        self._driver = driver
        self._metrics = metrics
        self._detached = detached
        self._keepalive = keepalive
        self._bodies = bodies
        self._body_bytes_max = body_bytes_max

    async def read(
        self,
        request: web.Request,
        kind: type[B],
        make: Callable[[B], T],
        refused: Mapping[str, Refused] = _NONE,
        *,
        bytes_max: int | None = None,
        warns_beyond: type[msgspec.Struct] | None = None,
    ) -> T:
        """Read a body and make of it what is needed; count the fields that are not known.

        Args:
            request: The client's.
            kind: The type of the body.
            make: Makes of it what is needed; for large bodies in a thread.
            refused: Fields that are refused.
            bytes_max: The limit of the route, where it is less than that of all.
            warns_beyond: Fields that are not of this type either are named by headers `Warning`.

        Raises:
            InvalidRequest: It cannot be read, or `make` refuses it; `param` names the field.
        """
        with self._metrics.refusals():
            body = await self._received(request, self._limit(bytes_max))
            made, unknown = await self._bodies.read(body, kind, make, refused, tenant_of(request))
            self._metrics.unknown_fields.inc(len(unknown))
            if warns_beyond is not None:
                known = warns_beyond.__struct_encode_fields__
                warn(request, [_ignored(field) for field in unknown if field not in known])
            return made

    async def compute(
        self,
        request: web.Request,
        kind: type[B],
        work: Callable[[B], msgspec.Struct],
        refused: Mapping[str, Refused] = _NONE,
        *,
        inline_bytes_max: int,
    ) -> web.Response:
        """Answer with what a function of a module makes of a body; larger ones in a child process.

        Raises:
            InvalidRequest: The body cannot be read, or `work` refuses it.
        """
        with self._metrics.refusals():
            body = await self._received(request, self._body_bytes_max)
            json, unknown = await self._bodies.compute(
                body,
                kind,
                work,
                refused,
                tenant_of(request),
                inline_bytes_max=inline_bytes_max,
            )
            self._metrics.unknown_fields.inc(len(unknown))
            return web.Response(body=json, content_type="application/json")

    async def _received(self, request: web.Request, bytes_max: int) -> bytes:
        with self._bodies.arriving(tenant_of(request)) as count:
            return await read_json(request, bytes_max, count)

    def _limit(self, bytes_max: int | None) -> int:
        return self._body_bytes_max if bytes_max is None else min(bytes_max, self._body_bytes_max)

    async def answer(
        self, request: web.Request, asks: Sequence[Ask], voice_of: VoiceOf, *, streamed: bool
    ) -> web.StreamResponse:
        """Answer prompts together, whole or as they are said.

        Raises:
            EngineError: Something went wrong before anything was told.
        """
        async with self._open(request, asks) as chorus:
            voice = await voice_of(chorus.streams)
            if streamed:
                return await self._tell(request, chorus, voice)
            answers = await self._whole(chorus)
            body = await self._written(
                _size(answers), lambda: voice.whole(answers), tenant_of(request)
            )
            await voice.keep()
            headers = _named(chorus)
            return web.Response(body=body, content_type="application/json", headers=headers)

    async def detach(
        self, request: web.Request, asks: Sequence[Ask], voice_of: VoiceOf, write: Write
    ) -> Voice:
        """Answer prompts whether or not the client stays; return once they have entered.

        Args:
            request: The client's.
            asks: The prompts.
            voice_of: Makes the voice; it has to keep what is said, since nobody may be there.
            write: Takes what the voice tells, as a client would.

        Raises:
            EngineError: One of them cannot enter, or the voice cannot begin.
        """
        begun: asyncio.Future[Voice] = asyncio.get_running_loop().create_future()
        self._detached.start(self._alone, request, asks, voice_of, write, begun)
        return await begun

    async def relay(
        self,
        request: web.Request,
        told: AsyncGenerator[bytes],
        failed: Callable[[EngineError], bytes],
    ) -> web.StreamResponse:
        """Pass on what was told elsewhere, until it is over or the client leaves.

        Raises:
            EngineError: There is nothing to pass on. If that comes later, `failed` writes it.
        """
        async with aclosing(told):
            first = await anext(told, b"")
            response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE} | _STREAM)
            request[BEGUN] = True
            try:
                await response.prepare(request)
                await response.write(first)
                try:
                    async for piece in told:
                        await response.write(piece)
                except EngineError as error:
                    await response.write(failed(error))
                await response.write_eof()
            except ConnectionError:
                pass  # the client left
            return response

    async def hear(self, request: web.Request, asks: Sequence[Ask]) -> list[Answer]:
        """Return the answers to prompts, for a reply that is no generation.

        Raises:
            EngineError: One of them ended with it.
        """
        async with self._open(request, asks) as chorus:
            return await self._whole(chorus)

    async def hear_each(
        self,
        request: web.Request,
        asks: Sequence[Ask],
        keep: Callable[[Answer], T],
        open_max: int,
    ) -> list[T]:
        """Return what is kept of the answer to each prompt; at most so many are under way.

        Raises:
            EngineError: One of them ended with it; the others are cancelled.
        """
        places = asyncio.Semaphore(self._entrance.together(tenant_of(request), open_max))

        async def one(ask: Ask) -> T:
            async with places:
                (answer,) = await self.hear(request, [ask])
                return keep(answer)

        return await together([one(ask) for ask in asks])

    @asynccontextmanager
    async def _open(self, request: web.Request, asks: Sequence[Ask]) -> AsyncGenerator[Chorus]:
        """Enter with every prompt, and leave with what has not ended: by cancellation, too."""
        trace = request.headers.get("traceparent")
        tenant = tenant_of(request)
        self._entrance.check_count(tenant, len(asks))
        room = self._entrance.detail_room()
        streams: dict[int, Stream] = {}

        async def enter(index: int) -> None:
            ask = msgspec.structs.replace(asks[index], tenant=tenant, traceparent=trace)
            streams[index] = await self._entrance.enter(ask, room)

        try:
            await together([enter(index) for index in range(len(asks))])
            chorus = Chorus([streams[index] for index in range(len(asks))])
            chorus.on_error = lambda error: _rename(error, asks[0])
            request[REQUEST_ID] = chorus.streams[0].submit.request_id
            yield chorus
        except EngineError as error:
            _rename(error, asks[0])
            raise
        finally:
            for stream in streams.values():
                self._entrance.leave(stream)

    async def _whole(self, chorus: Chorus) -> list[Answer]:
        answers = [Answer(stream) for stream in chorus.streams]
        while not chorus.ended:
            for prompt, events in await chorus.take():
                for event in events:
                    answers[prompt].hear(event)
                self._count(chorus.streams[prompt], events)
            if chorus.error is not None:
                raise chorus.error
        return answers

    async def _alone(
        self,
        request: web.Request,
        asks: Sequence[Ask],
        voice_of: VoiceOf,
        write: Write,
        begun: asyncio.Future[Voice],
    ) -> None:
        """Tell it to `write`. Once it has begun there is nobody to raise for."""
        try:
            async with self._open(request, asks) as chorus:
                voice = await voice_of(chorus.streams)
                if not begun.done():
                    begun.set_result(voice)
                await write(voice.begin())
                said = False
                while not chorus.ended and chorus.error is None:
                    taken = await chorus.take()
                    told = await self._told(chorus, taken, voice)
                    self._count_all(chorus, taken)
                    await write(told)
                    if not (said or chorus.ended):
                        said = True
                        await _keep_if_possible(voice)
        except EngineError as error:
            if not begun.done():
                begun.set_exception(error)

    async def _tell(self, request: web.Request, chorus: Chorus, voice: Voice) -> web.StreamResponse:
        """Write events as they come, and pings while none do."""
        with self._keepalive.watch(chorus) as silence:
            taken = await _first(chorus, silence)
            if chorus.error is not None and not taken:
                raise chorus.error
            return await self._stream(request, chorus, voice, taken, silence)

    async def _stream(
        self,
        request: web.Request,
        chorus: Chorus,
        voice: Voice,
        taken: Taken,
        silence: Silence,
    ) -> web.StreamResponse:
        headers = {"Content-Type": voice.CONTENT_TYPE} | _STREAM | _named(chorus)
        response = web.StreamResponse(headers=headers)
        request[BEGUN] = True
        try:
            async with asyncio.timeout(None) as patience:
                with _limit(chorus, patience):
                    await response.prepare(request)
                    await response.write(voice.begin() + await self._told(chorus, taken, voice))
                    silence.sent()
                    while not chorus.ended and chorus.error is None:
                        self._count_all(chorus, taken)
                        taken = await chorus.take()
                        if taken or silence.over or chorus.ended or chorus.error is not None:
                            await response.write(await self._told(chorus, taken, voice))
                            silence.sent()
                    await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client left; cancelling is up to the caller, as for every way to leave
        return response

    async def apart(self, request: web.Request, work: Callable[[], T]) -> T:
        """Return what Python work that goes by the length of a request comes to, in a thread.

        Raises:
            Overloaded: Too many requests of the tenant wait for the thread.
        """
        with self._metrics.refusals():
            return await self._bodies.call(work, tenant_of(request))

    async def _told(self, chorus: Chorus, taken: Taken, voice: Voice) -> bytes:
        """Put all that waits into one piece: one write, however many steps have passed."""
        size = sum(
            event.size_bytes for _, events in taken for event in events if isinstance(event, Said)
        )
        told = await self._written(
            size,
            lambda: b"".join([voice.chunks(prompt, events) for prompt, events in taken]),
            chorus.streams[0].submit.tenant,
        )
        if chorus.error is None and not chorus.ended:
            return told if taken else voice.ping()
        return told + await _last_words(chorus, voice)

    async def _written(self, size_bytes: int, write: Callable[[], bytes], tenant: str) -> bytes:
        """Parse and write an answer: here if it is short, else where it does not hold the loop."""
        if size_bytes <= LOOP_ANSWER_BYTES:
            return write()
        return await self._bodies.apart(write, tenant)

    def _count_all(self, chorus: Chorus, taken: Taken) -> None:
        for prompt, events in taken:
            self._count(chorus.streams[prompt], events)

    def _count(self, stream: Stream, events: Sequence[Heard]) -> None:
        for event in events:
            if isinstance(event, Said):
                self._driver.read(stream, event)


def _rename(error: EngineError, ask: Ask) -> None:
    """Name the field at fault as the client called it."""
    if error.param is None:
        return
    if error.param == _GRAMMAR:
        name = ask.grammar_field
    elif error.param in _PROMPT:
        name = ask.prompt_field or error.param
    else:
        name = _called(ask).get(error.param, error.param)
        if error.message.startswith(error.param):
            error.message = name + error.message[len(error.param) :]
    error.param = name


def _called(ask: Ask) -> dict[str, str]:
    details = ask.detail_fields
    return {
        "details.hidden": details.hidden,
        "details.named_ids": details.named_ids,
        "processors": "custom_params",
        **ask.fields,
    }


async def _first(chorus: Chorus, silence: Silence) -> Taken:
    """Wait for the first text, or until the headers are due without it.

    What fails before has a status of its own: all that the gateway, a tokenizer and the leader
    refuse, and most of what a worker refuses at once, as a grammar that does not compile.
    """
    while True:
        taken = await chorus.take()
        if taken or silence.over or chorus.ended or chorus.error is not None:
            return taken


def _ignored(field: str) -> str:
    """Warn of a field that is not known; its name may be of any length."""
    return f"{field[:_NAME_SHOWN]} is ignored: it is no field of this API"


def _size(answers: Sequence[Answer]) -> int:
    return sum(
        said.size_bytes for answer in answers for choice in answer.choices for said in choice.said
    )


async def _keep_if_possible(voice: Voice) -> None:
    """Show that there is something; that it cannot be shown now ends nothing."""
    try:
        await voice.keep()
    except EngineError as error:
        log.info("progress not kept", extra={"code": error.code})


async def _last_words(chorus: Chorus, voice: Voice) -> bytes:
    if chorus.error is not None:
        last = voice.failure(chorus.error)
    else:
        last = voice.end([end.usage for each in chorus.streams if (end := each.ended) is not None])
    try:
        await voice.keep()
    except EngineError as error:
        return last if chorus.error is not None else voice.failure(error)
    return last


@contextmanager
def _limit(chorus: Chorus, patience: asyncio.Timeout) -> Generator[None]:
    """Once all has ended, do not wait for ever for a client that has stopped reading."""

    def ended() -> None:
        if all(stream.ended is not None for stream in chorus.streams):
            patience.reschedule(asyncio.get_running_loop().time() + _LAST_WORDS_S)

    ended()
    for stream in chorus.streams:
        stream.on_end = ended
    try:
        yield
    finally:
        for stream in chorus.streams:
            stream.on_end = None


def _named(chorus: Chorus) -> dict[str, str]:
    return {"X-Request-Id": chorus.streams[0].submit.request_id}
