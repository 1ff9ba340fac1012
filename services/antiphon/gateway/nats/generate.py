"""`generate.<model>` and the gateway's control subject, for NATS clients."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.nats.inbox import TIMEOUT_MAX_S, authenticate, tenant_of
from antiphon.gateway.owner.actions import Ended, Finished, StreamEvent, TextDelta
from antiphon.gateway.requests.generation_request import GenerationRequest, SamplingOptions
from antiphon.gateway.stream.stream import raise_if_failed
from antiphon.service.endpoint import Endpoint, RequestEndpoint
from antiphon.service.tasks import isolated
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import id_count
from antiphon.wire.errors import (
    DuplicateRequest,
    EngineError,
    Internal,
    InvalidRequest,
    RequestTooLarge,
    Unavailable,
    encode_error,
)
from antiphon.wire.generate import (
    ChoiceEnd,
    GenerateAccepted,
    GenerateCancel,
    GenerateDone,
    GenerateEnd,
    GenerateRequest,
    GenerateResume,
    GenerateText,
    TextCursor,
)
from antiphon.wire.namespaces import cache_salt
from antiphon.wire.routes import GATEWAY_CONTROL, GENERATE
from antiphon.wire.sampling import StopStrings
from antiphon.wire.token_outputs import TokenOutputsBuffer, TokenOutputsChunk
from antiphon.wire.tokenize import TemplateParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from antiphon.bus.bus import Delivery
    from antiphon.gateway.requests.submission import Submission
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.wire.ids import ClientKey, InstanceId, RequestId, TenantId

log = logging.getLogger(__name__)

_RETAINED_S = 10.0  # how long after its end a request can be retried or resumed
_RETAINED_MAX = 1024
_LEAVING = Unavailable("this gateway is shutting down", retry_after_s=0.0)
_PIECE_BYTES_MAX = 128 * 1024
_PINGS = 6
_PING_S = 0.5


class NatsGenerationEndpoints:
    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._runtime = submission.runtime
        self._driver = submission.driver
        self._by_name: dict[tuple[TenantId, ClientKey], NatsGeneration] = {}
        self._by_id: dict[RequestId, NatsGeneration] = {}
        self._retained: list[NatsGeneration] = []
        self._pumps = set[asyncio.Task[None]]()

    def endpoints(self) -> Sequence[Endpoint]:
        return (
            *(
                RequestEndpoint(route=GENERATE, handler=self._generate, address={"model": name})
                for name in self._submission.served
            ),
            RequestEndpoint(
                route=GATEWAY_CONTROL,
                handler=self._control,
                address={"gateway": self._runtime.process.instance},
                while_draining=True,
            ),
        )

    async def idle(self) -> None:
        """Return when every client has been sent its end. The caller sets the deadline."""
        while self._pumps:
            await asyncio.wait(self._pumps)

    async def close(self) -> None:
        """Send the end to clients that have not received it; the tasks that would have are gone."""
        for generation in list(self._by_id.values()):
            if not generation.end_sent:
                generation.record_all(generation.stream.get_nowait())
                await self._send(generation, generation.replay(()))

    async def _generate(self, request: GenerateRequest, delivery: Delivery) -> GenerateAccepted:
        tenant = authenticate(self._submission, request.api_key, delivery)
        request = msgspec.structs.replace(request, api_key=None)  # not retained
        with self._submission.metrics.count_rejections(tenant):
            gen_request = _to_generation_request(request, tenant)
            earlier = self._by_name.get((tenant, request.key))
            digest = _digest(request)
            if earlier is not None and earlier.digest == digest:
                return await self._retry(earlier, delivery)
            if earlier is not None and not earlier.end_sent:
                raise DuplicateRequest(
                    f"a request with the key '{request.key}' is already running", param="key"
                )
            self._submission.access.count_request(tenant)
        generation = NatsGeneration(request, tenant, digest, delivery)
        self._by_name[tenant, request.key] = generation
        try:
            events = await self._open(generation, gen_request)
        except BaseException as error:
            generation.refusal = error if isinstance(error, EngineError) else _LEAVING
            self._drop(generation)
            raise
        finally:
            generation.opened.set()
        pump = self._runtime.group.create_task(isolated(self._pump, generation, events))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        return generation.accepted(self._runtime.process.instance)

    async def _retry(self, earlier: NatsGeneration, delivery: Delivery) -> GenerateAccepted:
        """Reply to a retry as to the first try, and resend the output, maybe to a new inbox."""
        await earlier.opened.wait()  # ends with the first try, at its deadline at the latest
        if earlier.refusal is not None:
            raise earlier.refusal
        earlier.delivery = delivery
        self._runtime.group.create_task(isolated(self._send, earlier, earlier.replay(())))
        return earlier.accepted(self._runtime.process.instance)

    async def _open(
        self, generation: NatsGeneration, gen_request: GenerationRequest
    ) -> list[StreamEvent]:
        stream = await self._submission.submit(gen_request, self._submission.token_output_budget())
        try:
            events = await stream.get()
            raise_if_failed(events)
        except BaseException:
            self._submission.release(stream)
            raise
        generation.open(stream)
        self._by_id[generation.id] = generation
        return events

    async def _pump(self, generation: NatsGeneration, events: list[StreamEvent]) -> None:
        def on_undelivered() -> None:
            generation.undelivered = True
            if not generation.probing and not generation.end_sent:
                generation.probing = True
                self._runtime.group.create_task(isolated(self._probe_client, generation, probe))

        try:
            with self._runtime.bus.detect_no_responders(on_undelivered) as probe:
                while not generation.end_sent:
                    await self._forward(generation, events, probe=probe)
                    if not generation.end_sent:
                        events = await generation.stream.get()
        except Exception:
            log.exception("generation failed", extra={"request_id": generation.id})
            self._driver.cancel(generation.stream, Internal("internal error"))
            generation.record_all(generation.stream.get_nowait())
            await self._send(generation, generation.replay(()))
            generation.end_sent = True
        self._submission.release(generation.stream)
        self._retain(generation)

    async def _forward(
        self, generation: NatsGeneration, events: Iterable[StreamEvent], *, probe: str | None
    ) -> None:
        # All events are recorded before any is sent: if this task is cancelled midway, `replay` has
        # the rest.
        for event, message in [(event, generation.record(event)) for event in events]:
            if message is not None:
                await self._send(generation, (message,), probe=probe)
            if isinstance(event, TextDelta):
                self._driver.mark_consumed(generation.stream, event)
            generation.end_sent |= isinstance(event, Ended)

    async def _send(
        self,
        generation: NatsGeneration,
        messages: Iterable[GenerateText | GenerateEnd],
        *,
        probe: str | None = None,
    ) -> None:
        """Publish to the client. It can ask for lost messages again, since all are kept."""
        try:
            for message in messages:
                await _respond(generation.delivery, message, probe)
        except EngineError as error:
            extra = {"request_id": generation.id, "code": error.code}
            log.info("client not reached", extra=extra)

    async def _probe_client(self, generation: NatsGeneration, probe: str) -> None:
        """Cancel a request whose client is unreachable for 3 s while the link works."""
        silent = 0
        while silent < _PINGS and not generation.end_sent:
            generation.undelivered = False
            await self._send(generation, (generation.ping(),), probe=probe)
            await asyncio.sleep(_PING_S)
            if not generation.undelivered and self._runtime.bus.link.up:
                generation.probing = False
                return
            silent = silent + 1 if generation.undelivered else 0
        if not generation.end_sent:
            log.info("client is gone", extra={"request_id": generation.id})
            self._driver.cancel(generation.stream)

    async def _control(
        self, message: GenerateResume | GenerateCancel, delivery: Delivery
    ) -> GenerateDone:
        generation = self._by_id.get(message.request_id)
        if generation is None or generation.tenant != tenant_of(delivery):
            raise InvalidRequest("this gateway has no such request", param="request_id")
        if isinstance(message, GenerateCancel):
            self._driver.cancel(generation.stream)
        else:
            for again in list(generation.replay(message.places)):
                await _respond(generation.delivery, again, None)
        return GenerateDone(request_id=message.request_id)

    def _retain(self, generation: NatsGeneration) -> None:
        """Retain an ended request for a while: its client may have missed the end."""
        self._retained.append(generation)
        asyncio.get_running_loop().call_later(_RETAINED_S, self._drop, generation)
        if len(self._retained) > _RETAINED_MAX:
            self._drop(self._retained[0])

    def _drop(self, generation: NatsGeneration) -> None:
        name = (generation.tenant, generation.request.key)
        if self._by_name.get(name) is generation:
            del self._by_name[name]
        if generation in self._retained:
            self._retained.remove(generation)
            del self._by_id[generation.id]


@dataclass(eq=False)
class NatsGeneration:
    """Keeps the output of a request until some time after its end. No bus and no clock."""

    request: GenerateRequest
    tenant: TenantId
    digest: bytes  # differs between a retry and another request with the same key
    delivery: Delivery  # of the last try, whose inbox and format apply from then on
    opened: asyncio.Event = field(default_factory=asyncio.Event)  # or `refusal` has the reason
    refusal: EngineError | None = None
    end_sent: bool = False
    undelivered: bool = False  # the last message found no subscriber
    probing: bool = False  # a probe checks that the client exists
    _stream: RequestStream | None = None
    _collected: list[_CollectedText] = field(default_factory=list["_CollectedText"])
    _finished: dict[int, Finished] = field(default_factory=dict[int, Finished])
    _ended: Ended | None = None

    @property
    def stream(self) -> RequestStream:
        assert self._stream is not None
        return self._stream

    @property
    def id(self) -> RequestId:
        return self.stream.submit.request_id

    def open(self, stream: RequestStream) -> None:
        self._stream = stream
        self._collected = [_CollectedText() for _ in range(stream.submit.choices)]

    def accepted(self, gateway: InstanceId) -> GenerateAccepted:
        submit = self.stream.submit
        return GenerateAccepted(
            key=self.request.key,
            request_id=self.id,
            gateway=gateway,
            details_from=submit.sampling.details_from(id_count(submit.prompt_ids)),
        )

    def record(self, event: StreamEvent) -> GenerateText | GenerateEnd | None:
        """Record an event, and format it for the client if it is new for it."""
        match event:
            case TextDelta():
                self._collected[event.choice].add(event)
                if self.request.stream:
                    return self._piece(event.choice, event.text_offset, event.text, event.details)
            case Finished():
                self._finished[event.choice] = event
            case Ended():
                self._ended = event
                return self._end(event)
            case _:
                pass
        return None

    def record_all(self, events: Iterable[StreamEvent]) -> None:
        for event in events:
            self.record(event)

    def replay(self, places: Iterable[TextCursor]) -> Iterator[GenerateText | GenerateEnd]:
        """Format the output beyond some offsets, and the terminal event if it was recorded."""
        starts = {place.choice: place for place in places}
        if self.request.stream:
            for choice, collected in enumerate(self._collected):
                for piece in collected.after(starts.get(choice)):
                    yield self._piece(choice, *piece)
        # If the terminal event is still in the stream, so is text before it, which must come first.
        if self._ended is not None:
            yield self._end(self._ended)

    def ping(self) -> GenerateText:
        """A message without content, to check that the client has a subscription."""
        return self._piece(0, len(self._collected[0].text), "", None)

    def _piece(
        self, choice: int, text_offset: int, text: str, details: TokenOutputsChunk | None
    ) -> GenerateText:
        return GenerateText(
            request_id=self.id,
            choice=choice,
            text_offset=text_offset,
            text=text,
            details=details,
        )

    def _end(self, ended: Ended) -> GenerateEnd:
        return GenerateEnd(
            request_id=self.id,
            choices=tuple(self._choice_end(choice) for choice in range(len(self._collected))),
            usage=ended.usage,
            error=None if ended.error is None else encode_error(ended.error),
        )

    def _choice_end(self, choice: int) -> ChoiceEnd:
        finished = self._finished.get(choice)
        collected, streamed = self._collected[choice], self.request.stream
        details = collected.details
        return ChoiceEnd(
            choice=choice,
            finish_reason=finished.reason if finished else FinishReason.ERROR,
            text_bytes=len(collected.text),
            text=None if streamed else collected.text.decode(),
            details=None
            if streamed or not details
            else collected.piece(details.first, details.end),
            details_end=details.end,
            matched_stop=finished.matched_stop if finished else None,
        )


class _CollectedText:
    def __init__(self) -> None:
        self.text = bytearray()
        self.details = TokenOutputsBuffer()
        self._texts: dict[int, str] = {}
        self._written: dict[int, bytes] = {}

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text.encode()
        if delta.details is not None:
            if not self.details:
                self.details = TokenOutputsBuffer(delta.details.offset)
            self.details.append(delta.details.details)
            self._texts |= delta.details.texts
            self._written |= delta.details.written

    def after(
        self, place: TextCursor | None
    ) -> Iterator[tuple[int, str, TokenOutputsChunk | None]]:
        """Return the output beyond an offset, as (offset, text, token outputs), text first."""
        start = place.text_offset if place else 0
        try:
            rest = self.text[start:].decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"offset {start} is inside a character", param="places") from None
        step = _PIECE_BYTES_MAX // 4  # a character has at most four bytes
        for first in range(0, len(rest), step):
            piece = rest[first : first + step]
            yield start, piece, None
            start += len(piece.encode())
        start_token = place.token_offset if place else None
        start_token = (
            self.details.first if start_token is None else max(start_token, self.details.first)
        )
        tokens = max(1, _PIECE_BYTES_MAX // 2 // max(1, self.details.token_bytes))
        for first in range(start_token, self.details.end, tokens):
            yield len(self.text), "", self.piece(first, first + tokens)

    def piece(self, start: int, stop: int) -> TokenOutputsChunk:
        details = self.details.read(start, stop)
        piece = TokenOutputsChunk(offset=max(start, self.details.first), details=details)
        return piece.with_texts(self._texts, self._written)


async def _respond(
    delivery: Delivery, message: GenerateText | GenerateEnd, probe: str | None
) -> None:
    try:
        delivery.respond(message, probe=probe)
    except RequestTooLarge as error:
        # Only a complete, non-streamed output can be this large.
        assert isinstance(message, GenerateEnd)
        bare = tuple(
            msgspec.structs.replace(choice, text=None, details=None) for choice in message.choices
        )
        rejection = msgspec.structs.replace(message, choices=bare, error=encode_error(error))
        delivery.respond(rejection, probe=probe)


def _digest(request: GenerateRequest) -> bytes:
    content = msgspec.structs.replace(request, traceparent=None, timeout_s=None)
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()


def _to_generation_request(request: GenerateRequest, tenant: TenantId) -> GenerationRequest:
    given = (request.messages, request.prompt, request.prompt_ids)
    if sum(each is not None for each in given) != 1:
        raise InvalidRequest(
            "exactly one of messages, prompt and prompt_ids is required", param="prompt"
        )
    if request.timeout_s is not None and request.timeout_s > TIMEOUT_MAX_S:
        raise InvalidRequest.at("timeout_s", f"must be at most {TIMEOUT_MAX_S:g}")
    return GenerationRequest(
        api="generate",
        model=request.model,
        messages=request.messages,
        prompt=request.prompt,
        prompt_ids=request.prompt_ids,
        continue_final_message=request.continue_final_message,
        template=TemplateParams(tools=request.tools, options=request.chat_template_kwargs),
        priority=request.priority,
        cache_salt=cache_salt(request.cache_salt),
        tokens_max=request.max_tokens,
        choices=request.n,
        sampling=SamplingOptions().with_fields_of(request),
        stop=StopStrings(
            strings=request.stop,
            patterns=request.stop_regex,
            include=request.no_stop_trim,
            skip_special_tokens=request.skip_special_tokens,
            token_texts=request.token_texts,
        ),
        model_defaults=True,
        tenant=tenant,
        key=request.key,
        timeout_s=request.timeout_s,
        traceparent=request.traceparent,
    )
