"""From a checked request to an open one: the same way in, whichever door it came through."""

from __future__ import annotations

import hashlib
import logging
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.gateway import PreferredSampling
from antiphon.gateway.ask import PROBE_DOOR, check
from antiphon.gateway.details import DetailRoom, check_start
from antiphon.gateway.encode import truncated
from antiphon.gateway.parsing.reasoning.constraint import after_thinking
from antiphon.gateway.request_log.request_log import RecordedStream
from antiphon.gateway.sampling import NOTHING, Seeds, answer_tokens, sampling_params
from antiphon.gateway.stream import Stream
from antiphon.service.deadline import deadline_in
from antiphon.service.model import served_names
from antiphon.telemetry.context import working_on
from antiphon.telemetry.tracing import span
from antiphon.wire.base import Role, State
from antiphon.wire.codec import id_count
from antiphon.wire.errors import (
    DuplicateRequest,
    Overloaded,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from antiphon.wire.ids import new_request_id
from antiphon.wire.sampling import SamplingParams
from antiphon.wire.submit import SubmitRequest
from antiphon.wire.tokenize import SamplingDefaults

if TYPE_CHECKING:
    from collections.abc import Generator

    from antiphon.gateway.access.access import Access
    from antiphon.gateway.access.tenant import Hold
    from antiphon.gateway.ask import Ask
    from antiphon.gateway.driver import Driver
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.metrics import GatewayMetrics
    from antiphon.gateway.request_log.request_log import RequestLog
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ClientKey, ModelName, RequestId, TenantId
    from antiphon.wire.tokenize import EncodeReply


log = logging.getLogger(__name__)

ANSWER_ROOM = 6
"""Tokens of the context that a truncated prompt leaves to its answer, as in SGLang."""


class Entrance:
    """Encodes, opens, and holds the names of live requests."""

    def __init__(
        self,
        runtime: Runtime,
        model: ModelName,
        driver: Driver,
        tokenizers: TokenizerCalls,
        metrics: GatewayMetrics,
        access: Access,
        request_log: RequestLog,
    ) -> None:
        self._runtime = runtime
        self._model = model
        self._driver = driver
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._access = access
        self._request_log = request_log
        gateway = runtime.settings.gateway
        self._model_defaults = gateway.sampling_defaults == "model"
        self._preferred = msgspec.json.decode(gateway.preferred_sampling, type=SamplingDefaults)
        limits = msgspec.json.decode(gateway.preferred_sampling, type=PreferredSampling)
        self._preferred_tokens = limits.max_new_tokens
        self._served = served_names(runtime.settings)
        self._seeds = Seeds.of(runtime.settings, runtime.process.instance)
        self._entering = 0
        self._probes = 0
        self._names: set[tuple[TenantId, ClientKey]] = set()

    def detail_room(self) -> DetailRoom:
        """Room for what is told of the tokens of one body's prompts."""
        return DetailRoom(self._runtime.settings.gateway.details_bytes_max)

    async def enter(self, ask: Ask, room: DetailRoom) -> Stream:
        """Open a request; from here on the caller reads its stream, or leaves it.

        Args:
            ask: The request.
            room: For what is told of its tokens, and of those of its body's other prompts.

        Raises:
            UnknownModel: It is not served here.
            Forbidden: The tenant may not use it.
            RateLimited: The tenant has used up one of its limits.
            DuplicateRequest: A live request of this tenant and gateway has the same key.
            Overloaded: As many requests are open as may be.
            Unavailable: This process leaves, or no tokenizer is there.
            InvalidRequest: The prompt or a limit does not fit the model or the tenant, or there is
                not so much room.
            Unsupported: An answer is wanted of a model that makes vectors, or the other way round.
        """
        with self._metrics.refusals(ask.tenant):
            if ask.model is not None and ask.model not in self._served:
                raise UnknownModel.of(ask.model, self._served)
            check(ask)
            self._check_room(ask)
            with self._holding(ask):
                return await self._held(ask, room)

    def check_count(self, tenant: TenantId, prompts: int) -> None:
        """Check that a tenant may have so many prompts answered together.

        Raises:
            InvalidRequest: It never may.
        """
        with self._metrics.refusals(tenant):
            self._access.fits(tenant, prompts)

    def together(self, tenant: TenantId, most: int) -> int:
        """How many prompts of one body may be under way at once, of at most so many."""
        return self._access.together(tenant, most)

    @property
    def idle(self) -> bool:
        """Whether it holds nothing: no request that enters, and no name."""
        return not (self._entering or self._names)

    def abort(self, prefix: str, *, tenant: TenantId | None = None, exact: bool = False) -> None:
        """End every request whose name, or else its id, begins so, or is so: as aborted.

        With a `tenant` only its own.
        """
        for stream in self._driver.streams():
            if tenant is not None and stream.submit.tenant != tenant:
                continue
            name = stream.name[1] if stream.name is not None else stream.submit.request_id
            if name == prefix or (name.startswith(prefix) and not exact):
                self._driver.abort(stream)

    def leave(self, stream: Stream) -> None:
        """Free the request's name, and cancel it unless it has ended."""
        if stream.name is not None:
            self._names.discard(stream.name)
        self._probes -= stream.door == PROBE_DOOR
        self._driver.leave(stream)

    @contextmanager
    def _holding(self, ask: Ask) -> Generator[None]:
        """Count a request that is not open yet, and take its name; keep it if all goes well."""
        name = _name(ask)
        probes = ask.door == PROBE_DOOR
        if name is not None:
            if name in self._names:
                text = f"a request with the rid '{ask.key}' is running"
                raise DuplicateRequest(text, param="rid")
            self._names.add(name)
        self._entering += 1
        self._probes += probes
        try:
            yield
        except BaseException:
            self._probes -= probes
            if name is not None:
                self._names.discard(name)
            raise
        finally:
            self._entering -= 1

    def _check_room(self, ask: Ask) -> None:
        if self._runtime.health.state is not State.READY:
            text = f"this gateway is {self._runtime.health.state}"
            raise Unavailable(text, retry_after_s=1.0)
        most = self._runtime.settings.gateway.requests_max
        if ask.door == PROBE_DOOR:
            return  # it has a place of its own: tenants neither lose one to it, nor take it
        if self._driver.open_count + self._entering - self._probes >= most:
            raise Overloaded(f"{most} requests are open, the limit", retry_after_s=1.0)

    async def _held(self, ask: Ask, room: DetailRoom) -> Stream:
        """Hold a part of the tenant's limits: until the request's end, or until it fails here."""
        hold = self._access.begin(ask, self._model)
        # The seed is drawn before the first wait: in the order in which requests come.
        sampling = ask.sampling if ask.pool is not None else self._seeds.fill(ask.sampling)
        priority = hold.tenant.priority(ask.priority)
        salt = self._access.cache_salt(ask)
        ask = msgspec.structs.replace(ask, priority=priority, sampling=sampling, cache_salt=salt)
        try:
            return await self._enter(ask, new_request_id(), hold, room)
        except BaseException:
            hold.end(0)
            raise

    async def _enter(self, ask: Ask, request_id: RequestId, hold: Hold, room: DetailRoom) -> Stream:
        clock = self._runtime.clock
        came_at = clock.now()
        timeout_s = ask.timeout_s or self._runtime.settings.gateway.request_timeout_s
        deadline_unix_ms = deadline_in(timeout_s, clock)
        record = self._request_log.begin(ask, request_id)
        whole = span(
            f"gateway.{ask.door}", ask.traceparent, request_id=request_id, tenant=ask.tenant
        ).start()
        try:
            with working_on(request_id), span("gateway.encode", whole.traceparent) as here:
                encoded = await self._tokenizers.encode(
                    ask,
                    request_id,
                    deadline_unix_ms,
                    here.traceparent,
                    truncate=self._truncates(ask),
                )
            _check_kind(ask, encoded)
            with working_on(request_id):
                encoded = self._fitted(ask, encoded)
            check_start(ask, id_count(encoded.token_ids))
            ask = self._tokenizers.template_defaults.switched(ask)
            ask, inside = _thinking(ask, encoded.text_end)
            tokens_max = self._reserve(ask, encoded, hold)
            submit = self._submission(
                ask, encoded, tokens_max, request_id, deadline_unix_ms, whole.traceparent
            )
            room.take(submit, ask.detail_fields, hidden_size=encoded.hidden_size)
        except BaseException as error:
            whole.end(error)
            if record is not None:
                self._request_log.refuse(record, error, came_at)
            raise
        kind = Stream if record is None else partial(RecordedStream, record, self._request_log)
        stream = kind(submit, whole, hold, door=ask.door, came_at=came_at, opened_at=clock.now())
        stream.inside = inside
        stream.truncated = encoded.untruncated_tokens is not None
        stream.labels = self._metrics.custom.current()
        stream.name = _name(ask)
        self._driver.open(stream)
        return stream

    def _truncates(self, ask: Ask) -> bool:
        """Whether a request may get less than it asks for: of its prompt, and of its answer."""
        allowed = self._runtime.settings.gateway.allow_auto_truncate
        # Without its end, a prompt with a gap would have neither the suffix nor the mark of it.
        return allowed and ask.auto_truncate and ask.suffix is None

    def _fitted(self, ask: Ask, encoded: EncodeReply) -> EncodeReply:
        """Truncate a prompt that leaves no room for its answer in any worker, if it may be."""
        context_tokens = max(self._contexts(encoded))
        answers = ask.tokens_max != 0
        if self._truncates(ask) and id_count(encoded.token_ids) + answers > context_tokens:
            kept = max(1, context_tokens - ANSWER_ROOM) if answers else context_tokens
            if ask.pair is None or kept > (encoded.second_from or kept):
                encoded = truncated(encoded, kept)
        if encoded.untruncated_tokens is not None:
            log.warning(
                "prompt truncated",
                extra={
                    "prompt_tokens": encoded.untruncated_tokens,
                    "kept_tokens": id_count(encoded.token_ids),
                    "context_tokens": context_tokens,
                },
            )
        return encoded

    def _reserve(self, ask: Ask, encoded: EncodeReply, hold: Hold) -> int:
        """Charge all that a request may need; return how many tokens each answer may have."""
        prompt_tokens = id_count(encoded.token_ids)
        tokens_max = answer_tokens(
            ask,
            prompt_tokens=prompt_tokens,
            contexts=self._contexts(encoded),
            preferred=self._preferred_tokens,
            truncate=self._truncates(ask),
        )
        return self._access.reserve(hold, ask, prompt_tokens=prompt_tokens, tokens_max=tokens_max)

    def _submission(
        self,
        ask: Ask,
        encoded: EncodeReply,
        tokens_max: int,
        request_id: RequestId,
        deadline_unix_ms: int,
        traceparent: str | None,
    ) -> SubmitRequest:
        sampling = self._sampling(ask, encoded, tokens_max)
        content = (self._model, encoded.token_ids, sampling, ask.stop, ask.choices)
        return SubmitRequest(
            request_id=request_id,
            owner=self._runtime.process,
            tenant=ask.tenant,
            model=self._model,
            digest=hashlib.sha256(msgspec.msgpack.encode(content)).digest(),
            prompt_ids=encoded.token_ids,
            block_digests=encoded.block_digests,
            choices=ask.choices,
            sampling=sampling,
            stop=ask.stop,
            priority=ask.priority or 0,
            cache_salt=ask.cache_salt,
            deadline_unix_ms=deadline_unix_ms,
            traceparent=traceparent,
        )

    def _sampling(self, ask: Ask, encoded: EncodeReply, tokens_max: int) -> SamplingParams:
        if ask.pool is not None:
            pool = msgspec.structs.replace(ask.pool, second_from=encoded.second_from)
            return SamplingParams(max_new_tokens=0, pool=pool)
        return sampling_params(
            ask,
            encoded.defaults if self._model_defaults else NOTHING,
            tokens_max=tokens_max,
            vocabulary_size=encoded.vocabulary_size,
            preferred=self._preferred,
        )

    def _contexts(self, encoded: EncodeReply) -> set[int]:
        """The longest context of each worker: its cache may hold less than the model takes."""
        beats = [peer.beat for peer in self._runtime.peers.of(Role.WORKER)]
        contexts = {
            min(encoded.context_tokens, beat.worker.context_tokens)
            for beat in beats
            if beat.worker is not None and beat.model == self._model
        }
        return contexts or {encoded.context_tokens}


def _name(ask: Ask) -> tuple[TenantId, ClientKey] | None:
    return None if ask.key is None else (ask.tenant, ask.key)


def _check_kind(ask: Ask, encoded: EncodeReply) -> None:
    """Refuse what the model does not do: it generates, or makes vectors of texts."""
    if ask.pool is None and encoded.pooling is not None:
        does = "scores labels" if encoded.pooling.scores else "embeds"
        raise Unsupported(f"this model does not generate: it {does}", param="model")
    if ask.pool is not None and encoded.pooling is None:
        raise Unsupported("this model does not embed: it generates text", param="model")


def _thinking(ask: Ask, text_end: str) -> tuple[Ask, bool]:
    """Put the form of an answer behind its thinking; say whether the answer begins as that.

    Its marks go along, for whoever counts the tokens of it.
    """
    thinks, grammar = ask.thinking, ask.sampling.grammar
    if thinks is None:
        return ask, False
    inside = thinks.format.begins_inside(text_end or None, thinking=thinks.switched)
    marks = thinks.format.marks(inside=inside, call_marks=thinks.call_marks)
    ask = msgspec.structs.replace(ask, stop=msgspec.structs.replace(ask.stop, thinking=marks))
    if grammar is None or thinks.switched is False:
        return ask, inside
    behind = after_thinking(grammar, thinks.format, inside=inside, end_id=thinks.end_id)
    sampling = msgspec.structs.replace(ask.sampling, grammar=behind)
    return msgspec.structs.replace(ask, sampling=sampling), inside
