"""The path from a request body to a response: submit, collect events, write them.

A family of APIs is a folder beside `core`. It has `operations()`, each a path with the struct of
its body; a parser, which makes a body a `GenerationRequest`; and a `ResponseWriter`, which formats
the response. How it shows errors is a line in `errors.py`. It uses neither bus nor connection.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec
from aiohttp import web

from antiphon.gateway.http.core import fields
from antiphon.gateway.http.core.app import REQUEST_ID, RESPONSE_STARTED, warn
from antiphon.gateway.http.core.auth import tenant_of
from antiphon.gateway.http.core.limits import LOOP_ANSWER_BYTES, SMALL_BODY_BYTES_MAX
from antiphon.gateway.http.core.receive import read_form, read_json
from antiphon.gateway.http.core.resume import Resumption, note_fingerprint
from antiphon.gateway.http.core.writer import CONTENT_TYPE, ResponseWriter
from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.gateway.stream.stream import (
    ChoiceEvent,
    CollectedResponse,
    RequestStream,
    StreamGroup,
)
from antiphon.service.tasks import gather, isolated
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import Cancelled, EngineError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence

    from antiphon.gateway.http.core.body_reader import BodyReader
    from antiphon.gateway.http.core.keepalive import IdleTimer, Keepalive
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.submission import BodyScope, Submission
    from antiphon.wire.ids import RequestId
    from antiphon.wire.tokenize import EncodeReply

    EventBatches = list[tuple[int, list[ChoiceEvent]]]
    WriterFactory = Callable[[Sequence[RequestStream]], Awaitable[ResponseWriter]]
    Write = Callable[[bytes], Awaitable[None]]

log = logging.getLogger(__name__)

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")
P = ParamSpec("P")

_PROSE_PARAMS = ("grammar", "prompt", "messages")
"""Names that are also words at the start of the messages of engines and tokenizers."""
_NAME_SHOWN = 100
"""Maximum number of characters shown of an unknown field's name."""
_UNKNOWN_FIELD = "it is not a field of this API"
_FINAL_WRITE_S = 10.0
"""How long a client may take to read the rest once its requests have ended."""

_STREAM = {
    "Cache-Control": "no-cache",
    # Disables nginx's response buffering.
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True, eq=False)
class ResponseHandler:
    """Holds a connection until its response is sent, or its client disconnects."""

    _submission: Submission
    _detached: DetachedTasks
    _keepalive: Keepalive
    _bodies: BodyReader

    async def parse_body(
        self,
        request: web.Request,
        kind: type[B],
        make: Callable[[B], T],
        *,
        bytes_max: int | None = None,
        warns_beyond: type[msgspec.Struct] | None = None,
    ) -> T:
        """Read a body and build the result of `make`, in a thread if the body is large.

        A `Warning` header names unknown fields that `warns_beyond` lacks too.

        Raises:
            InvalidRequest: It cannot be read, or `make` rejects it; `param` names the field.
        """
        with self._submission.metrics.count_rejections():
            body = await self._read_body(request, bytes_max)
            made, unknown = await self._bodies.read(body, kind, make, tenant_of(request))
            self._submission.metrics.unknown_fields.inc(len(unknown))
            if warns_beyond is not None:
                known = warns_beyond.__struct_encode_fields__
                names = [field[:_NAME_SHOWN] for field in unknown if field not in known]
                warn(request, [f"{name} is ignored: {_UNKNOWN_FIELD}" for name in names])
            return made

    async def tokenize(
        self, gen_request: GenerationRequest, request_id: RequestId, timeout_s: float
    ) -> EncodeReply:
        """Encode a prompt, media included, that is not submitted."""
        try:
            return await self._submission.tokenize(gen_request, request_id, timeout_s)
        except EngineError as error:
            _rename_error_field(error, gen_request)
            raise

    async def small_body(self, request: web.Request, kind: type[B]) -> B:
        """Read a body that holds only names and flags."""
        return await self.parse_body(
            request, kind, lambda body: body, bytes_max=SMALL_BODY_BYTES_MAX
        )

    async def compute(
        self, request: web.Request, kind: type[B], work: Callable[[B], msgspec.Struct]
    ) -> web.Response:
        """Respond with the result of a module-level function; large bodies use a child process."""
        with self._submission.metrics.count_rejections():
            body = await self._read_body(request)
            json, unknown = await self._bodies.compute(body, kind, work, tenant_of(request))
            self._submission.metrics.unknown_fields.inc(len(unknown))
            return web.Response(body=json, content_type="application/json")

    async def _read_body(self, request: web.Request, bytes_max: int | None = None) -> bytes:
        most = self._submission.runtime.settings.gateway.body_bytes_max
        with self._bodies.count_arriving(tenant_of(request)) as count:
            body = await read_json(request, min(bytes_max or most, most), count)
        note_fingerprint(request, body)
        return body

    async def answer(
        self,
        request: web.Request,
        gen_requests: Sequence[GenerationRequest],
        make_writer: WriterFactory,
        *,
        streamed: bool,
    ) -> web.StreamResponse:
        resumption = Resumption.of(request)
        if resumption is not None:
            gen_requests = resumption.apply(gen_requests, streamed=streamed)
        async with self._open(request, gen_requests, resumption) as stream_group:
            writer = await make_writer(stream_group.streams)
            if resumption is not None:
                writer = resumption.writer(writer, stream_group.streams[0].submit)
            if streamed:
                return await self._stream_response(request, stream_group, writer)
            answers = await self._collect(stream_group)
            body = await self._encode(
                _response_bytes(answers), lambda: writer.full_response(answers), tenant_of(request)
            )
            await writer.persist()
            headers = _request_id_headers(stream_group)
            return web.Response(body=body, content_type="application/json", headers=headers)

    async def detach(
        self,
        request: web.Request,
        gen_requests: Sequence[GenerationRequest],
        make_writer: WriterFactory,
        write: Write,
    ) -> None:
        """Run prompts independently of the client; return once they are submitted.

        `write` receives the bytes of the writer, as a client would. The writer must store the
        output: there may be no client.
        """
        submitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._detached.start(
            self._run_detached, request, gen_requests, make_writer, write, submitted
        )
        await submitted

    async def relay(
        self,
        request: web.Request,
        stream: AsyncGenerator[bytes],
        failed: Callable[[EngineError], bytes],
    ) -> web.StreamResponse:
        """Forward a stream produced elsewhere, until it ends or the client disconnects.

        An error before any output is raised; a later one is written by `failed`.
        """
        async with aclosing(stream):
            first = await anext(stream, b"")
            response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE} | _STREAM)
            request[RESPONSE_STARTED] = True
            try:
                await response.prepare(request)
                await response.write(first)
                try:
                    async for piece in stream:
                        await response.write(piece)
                except EngineError as error:
                    await response.write(failed(error))
                await response.write_eof()
            except ConnectionError:
                pass  # the client disconnected
            return response

    async def collect(
        self, request: web.Request, gen_requests: Sequence[GenerationRequest]
    ) -> list[CollectedResponse]:
        """Return the collected output of each prompt, for responses that are not generations."""
        async with self._open(request, gen_requests) as stream_group:
            return await self._collect(stream_group)

    @asynccontextmanager
    async def form(
        self, request: web.Request, kind: type[B], *, file_bytes_max: int
    ) -> AsyncGenerator[tuple[B, bytes]]:
        """Read a form with a file, of which requests are made one after the other.

        Its bytes count as the tenant's until the exit.

        Raises:
            InvalidRequest: It cannot be read, has no file, or a field is wrong.
            RequestTooLarge: The file is too large.
        """
        with self._bodies.count_arriving(tenant_of(request)) as count:
            with self._submission.metrics.count_rejections():
                form = await read_form(request, file_bytes_max, count)
                if form.file is None:
                    raise InvalidRequest("the form has no file", param="file")
                made, unknown = fields.read(form.json(kind), kind)
                self._submission.metrics.unknown_fields.inc(len(unknown))
            file = bytes(form.file)
            del form  # it would hold the file a second time
            with self._submission.job():
                yield made, file

    async def deltas(
        self, request: web.Request, gen_request: GenerationRequest
    ) -> AsyncGenerator[TextDelta]:
        """Yield the text of a prompt's only choice, and its token outputs, as they come."""
        async with self._open(request, [gen_request]) as stream_group:
            while not stream_group.done:
                for _, events in await stream_group.get():
                    self._count(stream_group.streams[0], events)
                    for event in events:
                        if isinstance(event, TextDelta):
                            yield event
                        if isinstance(event, Finished) and event.reason is FinishReason.ABORT:
                            raise Cancelled("the request was aborted")
            if stream_group.error is not None:
                raise stream_group.error

    async def collect_each(
        self,
        request: web.Request,
        gen_requests: Sequence[GenerationRequest],
        extract: Callable[[CollectedResponse], T],
    ) -> list[T]:
        """Return the extracted outputs of pooling requests, of which a limited number runs."""
        with self._submission.body(gen_requests) as body:

            async def one(gen_request: GenerationRequest) -> T:
                async with self._open(request, [gen_request], body=body) as stream_group:
                    (answer,) = await self._collect(stream_group)
                return extract(answer)

            return await self._submission.pool_each(gen_requests, one, tenant_of(request))

    @asynccontextmanager
    async def _open(
        self,
        request: web.Request,
        gen_requests: Sequence[GenerationRequest],
        resumption: Resumption | None = None,
        *,
        body: BodyScope | None = None,
    ) -> AsyncGenerator[StreamGroup]:
        """Submit all requests, and release them on exit, cancellation included.

        A resumed one is opened again. One that may be resumed goes on if the client has left.
        Without a `body` they are all that theirs has.
        """
        trace = request.headers.get("traceparent")
        tenant = tenant_of(request)
        self._submission.check_concurrency(tenant, len(gen_requests))
        streams: dict[int, RequestStream] = {}

        async def enter(index: int, body: BodyScope) -> None:
            gen_request = msgspec.structs.replace(
                gen_requests[index], tenant=tenant, traceparent=trace
            )
            if resumption is not None and resumption.position is not None:
                position = resumption.position
                streams[index] = await self._submission.resume(
                    gen_request, position.request_id, position.client_has
                )
            else:
                try:
                    streams[index] = await self._submission.submit(gen_request, body)
                except EngineError as error:
                    _rename_error_field(error, gen_request)
                    raise

        resumable = resumption is not None
        try:
            own = self._submission.body(gen_requests) if body is None else nullcontext(body)
            with own as scope:
                await gather([enter(index, scope) for index in range(len(gen_requests))])
            stream_group = StreamGroup([streams[index] for index in range(len(gen_requests))])
            stream_group.on_error = lambda error, prompt: _rename_error_field(
                error, gen_requests[prompt]
            )
            request[REQUEST_ID] = stream_group.streams[0].submit.request_id
            yield stream_group
        except EngineError as error:
            resumable = False
            _rename_error_field(error, gen_requests[0])
            raise
        finally:
            for stream in streams.values():
                self._submission.release(stream, resumable=resumable)

    async def _collect(self, stream_group: StreamGroup) -> list[CollectedResponse]:
        answers = [CollectedResponse(stream) for stream in stream_group.streams]
        while not stream_group.ended:
            for prompt, events in await stream_group.get():
                for event in events:
                    answers[prompt].add(event)
                self._count(stream_group.streams[prompt], events)
            if stream_group.error is not None:
                raise stream_group.error
        return answers

    async def _run_detached(
        self,
        request: web.Request,
        gen_requests: Sequence[GenerationRequest],
        make_writer: WriterFactory,
        write: Write,
        submitted: asyncio.Future[None],
    ) -> None:
        """Write the response to `write`. Once `submitted` is set, no caller can get an error."""
        try:
            async with self._open(request, gen_requests) as stream_group:
                writer = await make_writer(stream_group.streams)
                if not submitted.done():
                    submitted.set_result(None)
                await write(writer.begin())
                started = False
                while not stream_group.done:
                    batches = await stream_group.get()
                    data = await self._encode_events(stream_group, batches, writer)
                    self._count_all(stream_group, batches)
                    await write(data)
                    if not (started or stream_group.ended):
                        started = True
                        await _persist_if_possible(writer)
        except Exception as error:
            if not submitted.done():
                submitted.set_exception(error)
            elif not isinstance(error, EngineError):
                raise

    async def _stream_response(
        self, request: web.Request, stream_group: StreamGroup, writer: ResponseWriter
    ) -> web.StreamResponse:
        with self._keepalive.watch(stream_group) as silence:
            taken = await _first_events(stream_group, silence)
            if stream_group.error is not None and not taken:
                raise stream_group.error
            return await self._write_stream(request, stream_group, writer, taken, silence)

    async def _write_stream(
        self,
        request: web.Request,
        stream_group: StreamGroup,
        writer: ResponseWriter,
        taken: EventBatches,
        silence: IdleTimer,
    ) -> web.StreamResponse:
        headers = (
            {"Content-Type": writer.CONTENT_TYPE} | _STREAM | _request_id_headers(stream_group)
        )
        response = web.StreamResponse(headers=headers)
        request[RESPONSE_STARTED] = True
        try:
            async with asyncio.timeout(None) as patience:
                with _limit(stream_group, patience):
                    await response.prepare(request)
                    await response.write(
                        writer.begin() + await self._encode_events(stream_group, taken, writer)
                    )
                    silence.reset()
                    while not stream_group.done:
                        self._count_all(stream_group, taken)
                        taken = await stream_group.get()
                        if taken or silence.is_due or stream_group.done:
                            await response.write(
                                await self._encode_events(stream_group, taken, writer)
                            )
                            silence.reset()
                    await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client disconnected; the caller cancels the requests, as on every exit
        return response

    async def run_in_thread(self, request: web.Request, work: Callable[[], T]) -> T:
        """Run Python work proportional to a request's size in a thread."""
        with self._submission.metrics.count_rejections():
            return await self._bodies.run_admitted(work, tenant_of(request))

    async def _encode_events(
        self, stream_group: StreamGroup, taken: EventBatches, writer: ResponseWriter
    ) -> bytes:
        """Encode all waiting events as one piece: one write, however many steps have passed."""
        size = sum(
            event.size_bytes
            for _, events in taken
            for event in events
            if isinstance(event, TextDelta)
        )
        data = await self._encode(
            size,
            lambda: b"".join([writer.chunks(prompt, events) for prompt, events in taken]),
            stream_group.streams[0].submit.tenant,
        )
        if not stream_group.done:
            return data if taken else writer.ping()
        return data + await _final_events(stream_group, writer)

    async def _encode(self, size_bytes: int, write: Callable[[], bytes], tenant: str) -> bytes:
        """Parse and encode output: here if it is short, else in a thread."""
        if size_bytes <= LOOP_ANSWER_BYTES:
            return write()
        return await self._bodies.run_in_thread(write, tenant)

    def _count_all(self, stream_group: StreamGroup, taken: EventBatches) -> None:
        for prompt, events in taken:
            self._count(stream_group.streams[prompt], events)

    def _count(self, stream: RequestStream, events: Sequence[ChoiceEvent]) -> None:
        for event in events:
            if isinstance(event, TextDelta):
                self._submission.driver.mark_consumed(stream, event)


def _rename_error_field(error: EngineError, gen_request: GenerationRequest) -> None:
    if error.param is None:
        return
    name = gen_request.field(error.param)
    if error.param not in _PROSE_PARAMS and error.message.startswith(error.param):
        error.message = name + error.message[len(error.param) :]
    error.param = name


async def _first_events(stream_group: StreamGroup, silence: IdleTimer) -> EventBatches:
    """Wait for the first text, or until the headers are due without it.

    An earlier failure has its own status: everything that the gateway, a tokenizer and the leader
    reject, and most of what a worker rejects at once, such as a grammar that does not compile.
    """
    while True:
        taken = await stream_group.get()
        if taken or silence.is_due or stream_group.done:
            return taken


def _response_bytes(answers: Sequence[CollectedResponse]) -> int:
    return sum(
        delta.size_bytes
        for answer in answers
        for choice in answer.choices
        for delta in choice.deltas
    )


async def _persist_if_possible(writer: ResponseWriter) -> None:
    try:
        await writer.persist()
    except EngineError as error:
        log.info("progress not stored", extra={"code": error.code})


async def _final_events(stream_group: StreamGroup, writer: ResponseWriter) -> bytes:
    if stream_group.error is not None:
        last = writer.failure(stream_group.error)
    else:
        last = writer.end(
            [end.usage for each in stream_group.streams if (end := each.ended) is not None]
        )
    try:
        await writer.persist()
    except EngineError as error:
        return last if stream_group.error is not None else writer.failure(error)
    return last


@contextmanager
def _limit(stream_group: StreamGroup, patience: asyncio.Timeout) -> Generator[None]:
    """Once all requests have ended, limit the wait for a client that stopped reading."""

    def ended() -> None:
        if all(stream.ended is not None for stream in stream_group.streams):
            patience.reschedule(asyncio.get_running_loop().time() + _FINAL_WRITE_S)

    ended()
    for stream in stream_group.streams:
        stream.on_end = ended
    try:
        yield
    finally:
        for stream in stream_group.streams:
            stream.on_end = None


def _request_id_headers(stream_group: StreamGroup) -> dict[str, str]:
    return {"X-Request-Id": stream_group.streams[0].submit.request_id}


class DetachedTasks:
    """Runs each in a task of the process."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running = set[asyncio.Task[None]]()

    def start(
        self, work: Callable[P, Coroutine[None, None, None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        task = self._group.create_task(isolated(work, *args, **kwargs))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def idle(self) -> None:
        """Return when no task is running. The caller sets the deadline."""
        while self._running:
            await asyncio.wait(self._running)
