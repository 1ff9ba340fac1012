"""Submission of a validated request, the same for all APIs."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.config.gateway import PreferredSampling
from antiphon.gateway.request_log.request_log import RecordedStream, RequestLog
from antiphon.gateway.requests.client_ids import ClientIds, client_id
from antiphon.gateway.requests.generation_request import (
    PROBE_API,
    GenerationRequest,
    Seeds,
    validate_request,
)
from antiphon.gateway.requests.output_budget import TokenOutputBudget, output_bytes
from antiphon.gateway.requests.pooling import OPEN_MAX
from antiphon.gateway.requests.renewed_media import RenewedMedia
from antiphon.gateway.requests.resumed_streams import ResumedStreams
from antiphon.gateway.requests.submit_request import (
    SubmitRequestBuilder,
    apply_reasoning,
    check_logprob_start,
    check_model_kind,
    check_transcribes,
)
from antiphon.gateway.requests.tokenizer_client import CARD_TIMEOUT_S, TokenizerClient
from antiphon.gateway.stream.stream import RequestStream
from antiphon.model_card.served_model import served_names
from antiphon.model_card.untaken_media import untaken_reason
from antiphon.service.clock import deadline_in
from antiphon.service.tasks import gather
from antiphon.telemetry.tracing import request_context, span
from antiphon.wire.base import ProcessState
from antiphon.wire.claim import CLAIMED_BYTES_MIN
from antiphon.wire.codec import id_count
from antiphon.wire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from antiphon.wire.ids import ModelName, RequestId, TenantId, new_request_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from antiphon.gateway.access.access import Access
    from antiphon.gateway.access.limits import QuotaReservation
    from antiphon.gateway.media.intake import MediaIntake
    from antiphon.gateway.media.stored import HeldMedia, HeldPrompt, SharedMedia
    from antiphon.gateway.owner.driver import OwnerDriver
    from antiphon.gateway.request_metrics import GatewayMetrics
    from antiphon.service.service import Runtime
    from antiphon.wire.media import Medium
    from antiphon.wire.submit import SubmitRequest
    from antiphon.wire.tokenize import EncodeReply

T = TypeVar("T")


@dataclass(eq=False)
class Submission:
    """Tokenizes and opens requests, and keeps the ids of running ones."""

    runtime: Runtime
    model: ModelName
    driver: OwnerDriver
    tokenizers: TokenizerClient
    metrics: GatewayMetrics
    access: Access
    request_log: RequestLog
    media: MediaIntake
    _submitting: int = field(default=0, init=False)
    _probes: int = field(default=0, init=False)
    _ids: ClientIds = field(default_factory=ClientIds, init=False)
    _jobs: set[asyncio.Future[None]] = field(
        default_factory=set["asyncio.Future[None]"], init=False
    )

    def __post_init__(self) -> None:
        gateway = self.runtime.settings.gateway
        preferred = msgspec.json.decode(gateway.preferred_sampling, type=PreferredSampling)
        self._builder = SubmitRequestBuilder(self.runtime, self.model, preferred)
        media = RenewedMedia(self.runtime, self.driver, self.media, self._open_media)
        self._resumed = ResumedStreams(self.runtime, self.driver, self.metrics, self._ids, media)
        self.served = served_names(self.runtime.settings)
        self._seeds = Seeds.of(self.runtime.settings, self.runtime.process.instance)

    @contextmanager
    def body(self, gen_requests: Sequence[GenerationRequest]) -> Generator[BodyScope]:
        """What the prompts of one body share while they run, until the exit."""
        budget = TokenOutputBudget(self.runtime.settings.gateway.details_bytes_max)
        media = self.media.shared([gen_request.media for gen_request in gen_requests])
        try:
            yield BodyScope(budget, media)
        finally:
            media.close()

    async def submit(self, gen_request: GenerationRequest, body: BodyScope) -> RequestStream:
        """Open a request of a body. The caller then reads its stream, or releases it.

        Raises:
            UnknownModel: The model is not served.
            Forbidden: The tenant may not use the model.
            RateLimited: The tenant has reached one of its limits.
            DuplicateRequest: A running request of this tenant and gateway has the same id.
            Overloaded: The limit of open requests is reached.
            Unavailable: This process is draining, or no tokenizer is available.
            EngineError: The request is invalid, or its prompt does not fit.
        """
        with self.metrics.count_rejections(gen_request.tenant):
            if gen_request.model is not None and gen_request.model not in self.served:
                raise UnknownModel.of(gen_request.model, self.served)
            validate_request(gen_request)
            self._check_capacity(gen_request)
            with self._reserve_name(gen_request):
                return await self._submit_with_reservation(gen_request, body)

    async def tokenize(
        self, gen_request: GenerationRequest, request_id: RequestId, timeout_s: float
    ) -> EncodeReply:
        """Encode a prompt that is not opened. Its media are held only meanwhile.

        Raises:
            EngineError: The prompt or a medium is invalid, or no tokenizer is available.
        """
        deadline_unix_ms = deadline_in(timeout_s, self.runtime.clock)
        media = await self._open_media(gen_request, timeout_s) if gen_request.media else None
        headers = () if media is None else media.headers
        if media is not None:
            media.discard()
        return await self.tokenizers.encode(
            gen_request, request_id, deadline_unix_ms, None, media=headers
        )

    async def resume(
        self,
        gen_request: GenerationRequest,
        request_id: RequestId,
        client_has: Sequence[tuple[int, int | None]],
    ) -> RequestStream:
        """Open the stream of an earlier request once more, at its beginning.

        The request is one of this gateway, or becomes one. Its client has so many bytes of the text
        of each choice, and token outputs up to an offset.

        Raises:
            UnknownStream: There is no such stream of this tenant.
            InvalidRequest: `gen_request` is another one than the stream was started with.
            RateLimited: The tenant has as many running requests as it may.
            Unavailable: No scheduler knows the request at present.
        """
        if gen_request.resume is None:
            raise InvalidRequest("only a stream that was started so can be resumed")
        with self.metrics.count_rejections(gen_request.tenant):
            reservation = self.access.admit(gen_request, self.model)
            try:
                stream = await self._resumed.open(
                    gen_request, gen_request.resume, request_id, client_has, reservation
                )
            except BaseException:
                reservation.end(0)
                raise
            if stream.reservation is not reservation:
                reservation.end(0)
        return stream

    def check_concurrency(self, tenant: TenantId, prompts: int) -> None:
        with self.metrics.count_rejections(tenant):
            self.access.check_concurrency(tenant, prompts)

    async def pool_each(
        self,
        gen_requests: Sequence[GenerationRequest],
        run: Callable[[GenerationRequest], Awaitable[T]],
        tenant: TenantId,
    ) -> list[T]:
        """Run the pooling requests of one body; the tenant's limit of concurrency applies."""
        slots = asyncio.Semaphore(self.access.max_concurrent(tenant, OPEN_MAX))

        async def one(gen_request: GenerationRequest) -> T:
            async with slots:
                return await run(gen_request)

        return await gather([one(gen_request) for gen_request in gen_requests])

    @contextmanager
    def job(self) -> Generator[None]:
        """While this is entered, requests follow each other that were accepted together."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.add(done)
        try:
            yield
        finally:
            self._jobs.discard(done)
            done.set_result(None)

    async def jobs_ended(self) -> None:
        """Return when there is no job. The caller sets the deadline."""
        while self._jobs:
            await asyncio.wait(self._jobs)

    @property
    def idle(self) -> bool:
        return not (self._submitting or self._ids)

    def abort(self, prefix: str, *, tenant: TenantId | None = None, exact: bool = False) -> None:
        """Abort every request whose id (the client's, else the cluster's) has this prefix or is it.

        With a `tenant`, only its requests.
        """
        for stream in self.driver.streams():
            if tenant is not None and stream.submit.tenant != tenant:
                continue
            name = stream.name[1] if stream.name is not None else stream.submit.request_id
            if name == prefix or (name.startswith(prefix) and not exact):
                self.driver.abort(stream)

    def release(self, stream: RequestStream, *, resumable: bool = False) -> None:
        """Free the request's id, and cancel the request if it has not ended.

        If it is `resumable`, and its client has asked for that, it goes on for a while.
        """
        self._ids.free(stream.name)
        self._probes -= stream.api == PROBE_API
        if resumable and stream.submit.resume_ms:
            self.driver.detach(stream)
        else:
            self.driver.cancel(stream)

    @contextmanager
    def _reserve_name(self, gen_request: GenerationRequest) -> Generator[None]:
        """Count a request being submitted and reserve its id, which is kept on success."""
        name = self._ids.reserve(gen_request)
        probes = gen_request.api == PROBE_API
        self._submitting += 1
        self._probes += probes
        try:
            yield
        except BaseException:
            self._probes -= probes
            self._ids.free(name)
            raise
        finally:
            self._submitting -= 1

    def _check_capacity(self, gen_request: GenerationRequest) -> None:
        state = self.runtime.health.state
        continues = gen_request.continues and state is ProcessState.DRAINING
        if state is not ProcessState.READY and not continues:
            text = f"this gateway is {state}"
            raise Unavailable(text, retry_after_s=1.0)
        most = self.runtime.settings.gateway.requests_max
        if gen_request.api == PROBE_API:
            return  # health checks have a slot of their own
        if self.driver.open_count + self._submitting - self._probes >= most:
            raise Overloaded(
                f"too many open requests: the limit is {most}; retry later", retry_after_s=1.0
            )

    async def _submit_with_reservation(
        self, gen_request: GenerationRequest, body: BodyScope
    ) -> RequestStream:
        """Reserve the tenant's quota until the request ends, or until submission fails."""
        reservation = self.access.admit(gen_request, self.model)
        # The seed is set before the first await, so that seeds follow the order of arrival.
        sampling = (
            gen_request.sampling
            if gen_request.pooling is not None
            else self._seeds.fill(gen_request.sampling)
        )
        priority = reservation.tenant.priority(gen_request.priority)
        salt = self.access.cache_salt(gen_request)
        gen_request = msgspec.structs.replace(
            gen_request, priority=priority, sampling=sampling, cache_salt=salt
        )
        try:
            return await self._encode_and_open(gen_request, new_request_id(), reservation, body)
        except BaseException:
            reservation.end(0)
            raise

    async def _encode_and_open(
        self,
        gen_request: GenerationRequest,
        request_id: RequestId,
        reservation: QuotaReservation,
        body: BodyScope,
    ) -> RequestStream:
        clock = self.runtime.clock
        came_at = clock.now()
        timeout_s = gen_request.timeout_s or self.runtime.settings.gateway.request_timeout_s
        deadline_unix_ms = deadline_in(timeout_s, clock)
        record = self.request_log.begin(gen_request, request_id)
        media: HeldMedia | None = None
        prompt: HeldPrompt | None = None
        trace = span(
            f"gateway.{gen_request.api}",
            gen_request.traceparent,
            request_id=request_id,
            tenant=gen_request.tenant,
        ).start()
        try:
            if gen_request.media:
                with span("gateway.media", trace.traceparent):
                    media = await self._open_media(gen_request, timeout_s, body.media)
            with request_context(request_id), span("gateway.encode", trace.traceparent) as here:
                encoded = await self.tokenizers.encode(
                    gen_request,
                    request_id,
                    deadline_unix_ms,
                    here.traceparent,
                    truncate=self._builder.may_truncate(gen_request),
                    media=() if media is None else media.headers,
                )
            check_model_kind(gen_request, encoded)
            if encoded.transcription is not None:
                check_transcribes(gen_request, encoded)
            with request_context(request_id):
                encoded = self._builder.truncate_to_context(gen_request, encoded)
            check_logprob_start(gen_request, id_count(encoded.token_ids))
            gen_request = self.tokenizers.template_defaults.with_reasoning_default(gen_request)
            gen_request, inside = apply_reasoning(gen_request, encoded.text_end)
            tokens_max = self._reserve(gen_request, encoded, reservation)
            submit = self._builder.build(
                gen_request, encoded, tokens_max, request_id, deadline_unix_ms, trace.traceparent
            )
            if media is not None:
                submit = _with_media(submit, media.placed(encoded.media))
            body.budget.reserve(submit, gen_request, hidden_size=encoded.hidden_size)
            size_bytes = output_bytes(submit, hidden_size=encoded.hidden_size)
            submit = msgspec.structs.replace(submit, output_bytes=size_bytes)
            prompt = await self._hold_prompt(submit, timeout_s)
        except BaseException as error:
            if media is not None:
                media.discard()
            trace.end(error)
            if record is not None:
                self.request_log.refuse(record, error, came_at)
            raise
        kind = (
            RequestStream
            if record is None
            else partial(RecordedStream, record=record, request_log=self.request_log)
        )
        stream = kind(
            submit,
            trace,
            reservation,
            api=gen_request.api,
            received_at=came_at,
            submitted_at=clock.now(),
        )
        stream.media, stream.prompt = media, prompt
        stream.starts_in_reasoning = inside
        stream.truncated = encoded.untruncated_tokens is not None
        stream.labels = self.metrics.custom.current()
        stream.name = client_id(gen_request)
        self.driver.open(stream)
        return stream

    async def _hold_prompt(self, submit: SubmitRequest, timeout_s: float) -> HeldPrompt | None:
        """Hold a long prompt for the workers, which fetch it from here.

        One whose stream may be resumed is sent: it outlives its gateway. And so are all where no
        worker is expected to reach this process.
        """
        if submit.resume is not None or not self.media.serves_prompts:
            return None
        size_bytes = len(submit.prompt_ids) + len(submit.block_digests)
        most = min(CLAIMED_BYTES_MIN, self.runtime.bus.transport.payload_bytes_max // 4)
        if size_bytes <= most:
            return None
        return await self.media.hold_prompt(submit.prompt_ids, timeout_s)

    async def _open_media(
        self, gen_request: GenerationRequest, timeout_s: float, shared: SharedMedia | None = None
    ) -> HeldMedia:
        """Fetch a request's media, within its time.

        Raises:
            DeadlineExceeded: They were not there in time.
            EngineError: The model takes none, or one cannot be used; `param` names the part.
        """
        first = gen_request.media[0].param
        if gen_request.prompt_ids is not None:
            text = "images cannot be combined with a prompt of token ids"
            raise InvalidRequest(text, param=first)
        card = await self.tokenizers.card(CARD_TIMEOUT_S)
        if gen_request.transcription is not None:
            if card.transcription is None:
                text = f"the model {self.model} does not transcribe audio"
                raise Unsupported(text, param="model")
        else:
            taken = {"image": card.sees, "video": card.sees_videos, "audio": card.takes_audio}
            for each in gen_request.media:
                kind = "audio" if each.is_audio else "video" if each.video else "image"
                if not taken[kind]:
                    named = kind if kind == "audio" else f"{kind}s"
                    text = f"the model {self.model} takes no {named}"
                    if (why := untaken_reason(card.architecture, kind)) is not None:
                        text = f"{text}: {why}"
                    raise Unsupported(text, param=each.param)
        try:
            async with asyncio.timeout(timeout_s):
                return await self.media.open(
                    gen_request.media,
                    timeout_s,
                    gen_request.pixel_limits,
                    gen_request.tenant,
                    width=card.media_width,
                    shared=shared,
                )
        except TimeoutError as error:
            text = f"the media of the request were not there within {timeout_s:g} s"
            raise DeadlineExceeded(text) from error

    def _reserve(
        self, gen_request: GenerationRequest, encoded: EncodeReply, reservation: QuotaReservation
    ) -> int:
        """Charge the maximum cost of a request; return the output token limit of each choice."""
        prompt_tokens = id_count(encoded.token_ids)
        tokens_max = self._builder.output_tokens(gen_request, encoded)
        return self.access.reserve(
            reservation, gen_request, prompt_tokens=prompt_tokens, tokens_max=tokens_max
        )


def _with_media(submit: SubmitRequest, media: tuple[Medium, ...]) -> SubmitRequest:
    """The request with its media, which are part of what makes a retry the same request."""
    content = (submit.digest, [medium.span.key for medium in media])
    digest = hashlib.sha256(msgspec.msgpack.encode(content)).digest()
    return msgspec.structs.replace(submit, digest=digest, media=media)


@dataclass(frozen=True, eq=False)
class BodyScope:
    """What the prompts of one body share."""

    budget: TokenOutputBudget
    media: SharedMedia
