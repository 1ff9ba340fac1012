"""`generate.<model>` and the gateway's control subject, for NATS clients."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.nats.generation import NatsGeneration
from antiphon.gateway.nats.inbox import TIMEOUT_MAX_S, authenticate, tenant_of
from antiphon.gateway.owner.actions import Ended, StreamEvent, TextDelta
from antiphon.gateway.requests.generation_request import (
    GenerationRequest,
    MediumSource,
    SamplingOptions,
    media_fields,
    resume_window,
)
from antiphon.gateway.stream.stream import raise_if_failed
from antiphon.service.endpoint import Endpoint, RequestEndpoint
from antiphon.service.tasks import isolated
from antiphon.wire.claim import PixelLimits
from antiphon.wire.errors import (
    DuplicateRequest,
    EngineError,
    Internal,
    InvalidRequest,
    RequestTooLarge,
    Unavailable,
    Unsupported,
    encode_error,
)
from antiphon.wire.generate import (
    GenerateAccepted,
    GenerateCancel,
    GenerateDone,
    GenerateEnd,
    GenerateRequest,
    GenerateResume,
    GenerateText,
    ResumePosition,
)
from antiphon.wire.namespaces import cache_salt
from antiphon.wire.routes import GATEWAY_CONTROL, GENERATE
from antiphon.wire.sampling import StopStrings
from antiphon.wire.tokenize import ChatMessage, TemplateParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from antiphon.bus.bus import Delivery
    from antiphon.gateway.requests.submission import Submission
    from antiphon.wire.ids import ClientKey, RequestId, TenantId

log = logging.getLogger(__name__)

_RETAINED_S = 10.0  # how long after its end a request can be retried or resumed
_RETAINED_MAX = 1024
_LEAVING = Unavailable("this gateway is shutting down", retry_after_s=0.0)
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
        """Send the end to clients that have not received it; the tasks that would have are gone.

        Those that can resume their response do so at another gateway.
        """
        for generation in list(self._by_id.values()):
            if not generation.end_sent and not generation.resumable:
                generation.record_all(generation.stream.get_nowait())
                await self._send(generation, generation.replay(()))

    async def _generate(self, request: GenerateRequest, delivery: Delivery) -> GenerateAccepted:
        tenant = authenticate(self._submission, request.api_key, delivery)
        request = msgspec.structs.replace(request, api_key=None)  # not retained
        digest = _digest(request)
        with self._submission.metrics.count_rejections(tenant):
            gen_request = to_generation_request(request, tenant, digest)
        if request.resume_from is not None:
            generation = NatsGeneration(request, tenant, digest, delivery)
            return await self._resume(generation, gen_request, request.resume_from)
        with self._submission.metrics.count_rejections(tenant):
            earlier = self._by_name.get((tenant, request.key))
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
            if isinstance(error, EngineError) and error.param is not None:
                error.param = gen_request.field(error.param)
            generation.refusal = error if isinstance(error, EngineError) else _LEAVING
            self._drop(generation)
            raise
        finally:
            generation.opened.set()
        self._start_pump(generation, events)
        return generation.accepted(self._runtime.process.instance)

    async def _retry(self, earlier: NatsGeneration, delivery: Delivery) -> GenerateAccepted:
        """Reply to a retry as to the first try, and resend the output, maybe to a new inbox."""
        await earlier.opened.wait()  # ends with the first try, at its deadline at the latest
        if earlier.refusal is not None:
            raise earlier.refusal
        earlier.delivery = delivery
        self._runtime.group.create_task(isolated(self._send, earlier, earlier.replay(())))
        return earlier.accepted(self._runtime.process.instance)

    async def _resume(
        self, generation: NatsGeneration, gen_request: GenerationRequest, position: ResumePosition
    ) -> GenerateAccepted:
        """Continue the response to an earlier request, of this gateway or another one."""
        known = {place.choice: (place.text_offset, place.token_offset) for place in position.places}
        client_has = [known.get(choice, (0, None)) for choice in range(gen_request.choices)]
        stream = await self._submission.resume(gen_request, position.request_id, client_has)
        generation.open(stream)
        generation.opened.set()
        self._by_name[generation.tenant, generation.request.key] = generation
        self._by_id[generation.id] = generation
        self._start_pump(generation, [])
        return generation.accepted(self._runtime.process.instance)

    async def _open(
        self, generation: NatsGeneration, gen_request: GenerationRequest
    ) -> list[StreamEvent]:
        with self._submission.body([gen_request]) as body:
            stream = await self._submission.submit(gen_request, body)
        try:
            events = await stream.get()
            raise_if_failed(events)
        except BaseException:
            self._submission.release(stream)
            raise
        generation.open(stream)
        self._by_id[generation.id] = generation
        return events

    def _start_pump(self, generation: NatsGeneration, events: list[StreamEvent]) -> None:
        pump = self._runtime.group.create_task(isolated(self._pump, generation, events))
        generation.pump = pump
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

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
        if generation.lost:
            self._drop(generation)
        else:
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
        """Give up a client that is unreachable for 3 s while the link works.

        Its request is cancelled, or goes on without it for a while if it can be resumed.
        """
        silent = 0
        while silent < _PINGS and not generation.end_sent:
            generation.undelivered = False
            await self._send(generation, (generation.ping(),), probe=probe)
            await asyncio.sleep(_PING_S)
            if not generation.undelivered and self._runtime.bus.link.up:
                generation.probing = False
                return
            silent = silent + 1 if generation.undelivered else 0
        if generation.end_sent:
            return
        log.info("client is gone", extra={"request_id": generation.id})
        if generation.resumable:
            self._detach(generation)
        else:
            self._driver.cancel(generation.stream)

    def _detach(self, generation: NatsGeneration) -> None:
        """Forget the output of a request: it is fetched again when the client resumes it."""
        if generation.pump is not None:
            generation.pump.cancel()
        self._submission.release(generation.stream, resumable=True)
        self._drop(generation)

    async def _control(
        self, message: GenerateResume | GenerateCancel, delivery: Delivery
    ) -> GenerateDone:
        generation, tenant = self._by_id.get(message.request_id), tenant_of(delivery)
        if generation is None and isinstance(message, GenerateCancel):
            submit = self._driver.find(message.request_id)  # it may go on without its client
            if submit is None or submit.tenant != tenant:
                raise _no_such_request()
            self._driver.cancel_detached(message.request_id)
        elif generation is None or generation.tenant != tenant:
            raise _no_such_request()
        elif isinstance(message, GenerateCancel):
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
        if generation.refusal is None and self._by_id.get(generation.id) is generation:
            del self._by_id[generation.id]


def _no_such_request() -> InvalidRequest:
    return InvalidRequest("this gateway has no such request", param="request_id")


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
    content = msgspec.structs.replace(request, traceparent=None, timeout_s=None, resume_from=None)
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()


def to_generation_request(
    request: GenerateRequest, tenant: TenantId, digest: bytes
) -> GenerationRequest:
    given = (request.messages, request.prompt, request.prompt_ids)
    if sum(each is not None for each in given) != 1:
        raise InvalidRequest(
            "exactly one of messages, prompt and prompt_ids is required", param="prompt"
        )
    media = _media(request)
    if request.timeout_s is not None and request.timeout_s > TIMEOUT_MAX_S:
        raise InvalidRequest.at("timeout_s", f"must be at most {TIMEOUT_MAX_S:g}")
    if request.resume_from is not None:
        if request.resume_s is None:
            raise InvalidRequest.at("resume_s", "must be the value that the request began with")
        if any(place.choice >= request.n for place in request.resume_from.places):
            raise InvalidRequest.at("resume_from", f"the request has {request.n} choices")
    window = None if request.resume_s is None else resume_window(request.resume_s, digest)
    return GenerationRequest(
        api="generate",
        model=request.model,
        messages=_messages(request),
        prompt=request.prompt,
        prompt_ids=request.prompt_ids,
        media=media,
        pixel_limits=_limits(request),
        fields={**media_fields(media), "mm_processor_kwargs": "max_pixels"},
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
        resume=window,
    )


def _limits(request: GenerateRequest) -> PixelLimits | None:
    limits = PixelLimits(
        least=request.min_pixels or 0,
        most=request.max_pixels or 0,
        fps=request.fps or 0.0,
        frames=request.max_frames or 0,
    )
    return None if limits == PixelLimits() else limits


def _media(request: GenerateRequest) -> tuple[MediumSource, ...]:
    media = list[MediumSource]()
    for index, given in enumerate(request.media):
        at, sources = f"media[{index}]", (given.data, given.url, given.claim)
        found = [each for each in sources if each is not None]
        if len(found) != 1:
            raise InvalidRequest.at(at, "must have either data, url or claim")
        if given.video and given.audio:
            raise InvalidRequest.at(at, "is either a video or audio")
        if (given.video or given.audio) and given.embedding is not None:
            raise Unsupported.at(f"{at}.embedding", "embeddings are of images")
        media.append(
            MediumSource(
                found[0],
                at,
                detail=given.detail,
                embedding=given.embedding,
                video=given.video,
                sound=given.audio,
            )
        )
    return tuple(media)


def _messages(request: GenerateRequest) -> tuple[ChatMessage, ...] | None:
    """Return the messages; their parts must name each medium of the request once, in order."""
    if request.messages is None:
        return None
    messages = tuple(
        _message(message, f"messages[{index}]") if message.parts else message
        for index, message in enumerate(request.messages)
    )
    named = [
        part.medium for message in messages for part in message.parts if part.medium is not None
    ]
    if named != list(range(len(request.media))):
        raise InvalidRequest.at(
            "messages",
            f"parts name the media {named}; the request has {len(request.media)} media, and each "
            "must be named once, in order",
        )
    return messages


def _message(message: ChatMessage, at: str) -> ChatMessage:
    for index, part in enumerate(message.parts):
        if (part.text is None) == (part.medium is None):
            raise InvalidRequest.at(f"{at}.parts[{index}]", "must have either text or medium")
    text = "".join(part.text or "" for part in message.parts)
    return msgspec.structs.replace(message, content=text)
