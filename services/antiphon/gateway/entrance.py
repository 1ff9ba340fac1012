"""From a checked request to an open one: the same way in, whichever door it came through."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.ask import check
from antiphon.gateway.parsing.reasoning.constraint import after_thinking
from antiphon.gateway.sampling import answer_tokens, sampling_params
from antiphon.gateway.stream import Stream
from antiphon.service.deadline import deadline_in
from antiphon.telemetry.context import working_on
from antiphon.telemetry.tracing import span
from antiphon.wire.base import Role, State
from antiphon.wire.codec import id_count
from antiphon.wire.errors import (
    DuplicateRequest,
    Overloaded,
    Unavailable,
    UnknownModel,
)
from antiphon.wire.ids import new_request_id
from antiphon.wire.submit import SubmitRequest

if TYPE_CHECKING:
    from collections.abc import Generator

    from antiphon.gateway.ask import Ask
    from antiphon.gateway.driver import Driver
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.metrics import GatewayMetrics
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ClientKey, ModelName, RequestId, TenantId
    from antiphon.wire.tokenize import EncodeReply


class Entrance:
    """Encodes, opens, and holds the names of live requests."""

    def __init__(
        self,
        runtime: Runtime,
        model: ModelName,
        driver: Driver,
        tokenizers: TokenizerCalls,
        metrics: GatewayMetrics,
    ) -> None:
        self._runtime = runtime
        self._model = model
        self._driver = driver
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._entering = 0
        self._names: set[tuple[TenantId, ClientKey]] = set()

    async def enter(self, ask: Ask) -> Stream:
        """Open a request; from here on the caller reads its stream, or leaves it.

        Raises:
            UnknownModel: It is not served here.
            DuplicateRequest: A live request of this tenant and gateway has the same key.
            Overloaded: As many requests are open as may be.
            Unavailable: This process leaves, or no tokenizer is there.
            InvalidRequest: The prompt or a limit does not fit the model.
        """
        with self._metrics.refusals():
            if ask.model is not None and ask.model != self._model:
                raise UnknownModel.of(ask.model)
            check(ask)
            self._check_room()
            with self._holding(ask):
                return await self._enter(ask, new_request_id())

    @property
    def idle(self) -> bool:
        """Whether it holds nothing: no request that enters, and no name."""
        return not (self._entering or self._names)

    def abort(self, prefix: str, *, exact: bool = False) -> None:
        """End every request whose name, or else its id, begins so, or is so: as aborted."""
        for stream in self._driver.streams():
            name = stream.name[1] if stream.name is not None else stream.submit.request_id
            if name == prefix or (name.startswith(prefix) and not exact):
                self._driver.abort(stream)

    def leave(self, stream: Stream) -> None:
        """Free the request's name, and cancel it unless it has ended."""
        if stream.name is not None:
            self._names.discard(stream.name)
        self._driver.leave(stream)

    @contextmanager
    def _holding(self, ask: Ask) -> Generator[None]:
        """Count a request that is not open yet, and take its name; keep it if all goes well."""
        name = _name(ask)
        if name is not None:
            if name in self._names:
                text = f"a request with the rid '{ask.key}' is running"
                raise DuplicateRequest(text, param="rid")
            self._names.add(name)
        self._entering += 1
        try:
            yield
        except BaseException:
            if name is not None:
                self._names.discard(name)
            raise
        finally:
            self._entering -= 1

    def _check_room(self) -> None:
        if self._runtime.health.state is not State.READY:
            text = f"this gateway is {self._runtime.health.state}"
            raise Unavailable(text, retry_after_s=1.0)
        most = self._runtime.settings.gateway.requests_max
        if self._driver.open_count + self._entering >= most:
            raise Overloaded(f"{most} requests are open, the limit", retry_after_s=1.0)

    async def _enter(self, ask: Ask, request_id: RequestId) -> Stream:
        clock = self._runtime.clock
        came_at = clock.now()
        timeout_s = ask.timeout_s or self._runtime.settings.gateway.request_timeout_s
        deadline_unix_ms = deadline_in(timeout_s, clock)
        whole = span(f"gateway.{ask.door}", ask.traceparent, request_id=request_id).start()
        try:
            with working_on(request_id), span("gateway.encode", whole.traceparent) as here:
                encoded = await self._tokenizers.encode(
                    ask, request_id, deadline_unix_ms, here.traceparent
                )
            ask, inside = _thinking(ask, encoded.text_end)
            submit = self._submission(ask, encoded, request_id, deadline_unix_ms, whole.traceparent)
        except BaseException as error:
            whole.end(error)
            raise
        stream = Stream(submit, whole, door=ask.door, came_at=came_at, opened_at=clock.now())
        stream.inside = inside
        stream.name = _name(ask)
        self._driver.open(stream)
        return stream

    def _submission(
        self,
        ask: Ask,
        encoded: EncodeReply,
        request_id: RequestId,
        deadline_unix_ms: int,
        traceparent: str | None,
    ) -> SubmitRequest:
        tokens_max = answer_tokens(
            ask,
            prompt_tokens=id_count(encoded.token_ids),
            context_tokens=min(encoded.context_tokens, self._worker_context(encoded)),
        )
        sampling = sampling_params(
            ask,
            encoded.defaults,
            tokens_max=tokens_max,
            vocabulary_size=encoded.vocabulary_size,
            seed=self._runtime.settings.model.random_seed,
        )
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
            priority=ask.priority,
            deadline_unix_ms=deadline_unix_ms,
            traceparent=traceparent,
        )

    def _worker_context(self, encoded: EncodeReply) -> int:
        """The longest context that some worker's cache holds: it may be less than the model's."""
        beats = [peer.beat for peer in self._runtime.peers.of(Role.WORKER)]
        contexts = [beat.worker.context_tokens for beat in beats if beat.worker is not None]
        return max(contexts, default=encoded.context_tokens)


def _name(ask: Ask) -> tuple[TenantId, ClientKey] | None:
    return None if ask.key is None else (ask.tenant, ask.key)


def _thinking(ask: Ask, text_end: str) -> tuple[Ask, bool]:
    """Put the form of an answer behind its thinking; say whether the answer begins as that."""
    thinks, grammar = ask.thinking, ask.sampling.grammar
    if thinks is None:
        return ask, False
    inside = thinks.format.begins_inside(text_end or None, thinking=thinks.switched)
    if grammar is None or thinks.switched is False:
        return ask, inside
    behind = after_thinking(grammar, thinks.format, inside=inside, end_id=thinks.end_id)
    sampling = msgspec.structs.replace(ask.sampling, grammar=behind)
    return msgspec.structs.replace(ask, sampling=sampling), inside
