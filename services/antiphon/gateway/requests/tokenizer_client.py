"""Client of the tokenizer service; retries slow and lost calls."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.gateway import read_template_kwargs
from antiphon.gateway.parsing.formats import Formats, formats_of
from antiphon.gateway.requests.generation_request import check_token_ids
from antiphon.service.clock import deadline_in, remaining_s
from antiphon.service.peers import Liveness, Peer, PeerChange
from antiphon.wire.base import ProcessState, Role
from antiphon.wire.codec import id_count, pack_ids, unpack_ids
from antiphon.wire.digests import BLOCK_TOKENS, DIGEST_BYTES, TOKEN_BYTES
from antiphon.wire.errors import (
    DeadlineExceeded,
    EngineError,
    Overloaded,
    PromptTooLong,
    Unavailable,
)
from antiphon.wire.ids import ModelName, RequestId, new_request_id
from antiphon.wire.namespaces import PageOrigin, prompt_digests
from antiphon.wire.routes import CANCEL_ENCODE, DECODE, TOKENIZE
from antiphon.wire.tokenize import (
    CancelEncode,
    DecodeRequest,
    EncodeReply,
    EncodeRequest,
    characters_max,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.service.service import Runtime
    from antiphon.wire.media import MediumHeader

log = logging.getLogger(__name__)

CARD_TIMEOUT_S = 5.0
"""Maximum time a request waits for a tokenizer to be available."""
_WAIT_MAX_S = 30.0
_DECODE_S = 10.0
_PAUSE_MAX_S = 2.0

STALE_S = 30.0
"""How long the broker may deliver calls to a dead process: the time to detect its death."""


class TokenizerClient:
    """Calls tokenizers. They are stateless, so repeating a call is harmless."""

    def __init__(self, runtime: Runtime, model: ModelName) -> None:
        self._runtime = runtime
        self._model = model
        self._hedge_s = runtime.settings.gateway.encode_hedge_s
        self.template_defaults = TemplateDefaults(runtime.settings.gateway.chat_template_kwargs)
        self._lost_calls = LostCalls(runtime)
        cluster = runtime.settings.cluster
        self._origin = PageOrigin(model_digest=cluster.model_digest, cluster_salt=cluster.hash_salt)
        self._card: EncodeReply | None = None
        self._marks: dict[str, int | None] = {}
        self._is_text: dict[str, bool] = {}

    async def encode(
        self,
        gen_request: GenerationRequest,
        request_id: RequestId,
        deadline_unix_ms: int,
        traceparent: str | None,
        *,
        truncate: bool = False,
        media: Sequence[MediumHeader] = (),
    ) -> EncodeReply:
        """Tokenize a prompt. With `truncate`, one longer than the context is truncated.

        A text too long to be tokenized is rejected in any case.
        """
        if self._card is not None:
            _check_length(gen_request, self._card, truncate=truncate)
        if gen_request.prompt_ids is not None:
            card = await self.card(CARD_TIMEOUT_S)
            return self._encode_ids(
                gen_request, gen_request.prompt_ids, request_id, card, truncate=truncate
            )
        gen_request = self.template_defaults.filled(gen_request)
        request = EncodeRequest(
            request_id=request_id,
            model=self._model,
            tenant=gen_request.tenant,
            messages=gen_request.messages,
            prompt=gen_request.prompt,
            pair=gen_request.text_pair,
            suffix=gen_request.suffix,
            continue_final_message=gen_request.continue_final_message,
            template=gen_request.template,
            special_tokens=gen_request.special_tokens,
            truncate=truncate,
            media=tuple(media),
            cache_salt=gen_request.cache_salt,
            deadline_unix_ms=deadline_unix_ms,
            traceparent=traceparent,
        )
        self._card = await self._hedged(request, CARD_TIMEOUT_S)
        return self._card

    async def decode(
        self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> tuple[str, ...]:
        request = DecodeRequest(
            request_id=new_request_id(),
            model=self._model,
            token_ids=tuple(map(pack_ids, rows)),
            skip_special_tokens=skip_special_tokens,
            deadline_unix_ms=deadline_in(_DECODE_S, self._runtime.clock),
            left_ms=round(_DECODE_S * 1000),
        )
        try:
            reply = await self._runtime.bus.call(
                DECODE, request, timeout_s=_DECODE_S, model=self._model
            )
        except EngineError as error:
            raise _public_error(error) from error
        return reply.texts

    async def token_id_of(self, mark: str) -> int | None:
        """Return the token id of a delimiter, if it is a single token."""
        if mark not in self._marks:
            reply = await self._encode_text(mark, CARD_TIMEOUT_S, special_tokens=False)
            ids = unpack_ids(reply.token_ids)
            self._marks[mark] = ids[0] if len(ids) == 1 else None
        return self._marks[mark]

    async def is_text(self, mark: str) -> bool:
        if mark not in self._is_text:
            token = await self.token_id_of(mark)
            texts = ("?",) if token is None else await self.decode([[token]])
            self._is_text[mark] = bool(texts[0])
        return self._is_text[mark]

    async def card(self, patience_s: float = 0.0) -> EncodeReply:
        """Return the model's metadata, from any earlier reply or a new call."""
        if self._card is None:
            self._card = await self._encode_text("-", patience_s)
        return self._card

    async def formats(self) -> Formats:
        """The formats of the model's output, configured or detected from its template."""
        return await formats_of(self._runtime.settings.gateway, self.card, self.is_text)

    def _encode_ids(
        self,
        gen_request: GenerationRequest,
        prompt_ids: tuple[int, ...],
        request_id: RequestId,
        card: EncodeReply,
        *,
        truncate: bool,
    ) -> EncodeReply:
        untruncated_tokens = None
        if len(prompt_ids) > card.context_tokens:
            if not truncate:
                raise PromptTooLong.of(
                    prompt_tokens=len(prompt_ids), tokens_max=card.context_tokens, param="prompt"
                )
            untruncated_tokens = len(prompt_ids)
            prompt_ids = prompt_ids[: card.context_tokens]
        check_token_ids(prompt_ids, card.vocabulary_size, "prompt")
        ids = pack_ids(prompt_ids)
        return msgspec.structs.replace(
            card,
            request_id=request_id,
            token_ids=ids,
            block_digests=prompt_digests(self._origin, gen_request.cache_salt, ids),
            text_end="",
            second_from=None,
            untruncated_tokens=untruncated_tokens,
        )

    async def _encode_text(
        self, text: str, patience_s: float, *, special_tokens: bool = True
    ) -> EncodeReply:
        request = EncodeRequest(
            request_id=new_request_id(),
            model=self._model,
            prompt=text,
            special_tokens=special_tokens,
            deadline_unix_ms=deadline_in(CARD_TIMEOUT_S, self._runtime.clock),
        )
        return await self._hedged(request, patience_s)

    async def _hedged(self, request: EncodeRequest, patience_s: float) -> EncodeReply:
        outcome = await self._call_until_answered(request, patience_s)
        if not isinstance(outcome, EngineError):
            return outcome
        if remaining_s(request.deadline_unix_ms, self._runtime.clock) <= 0:
            raise DeadlineExceeded("the request's deadline has passed")
        raise _public_error(outcome)

    async def _call_until_answered(
        self, request: EncodeRequest, patience_s: float
    ) -> EncodeReply | EngineError:
        """Call until a tokenizer replies, with increasing pauses.

        Calls again after an error; once in parallel to a slow call, if there is another tokenizer;
        and whenever calls may have been lost: a tokenizer that died took its calls along, and a new
        one is available soon.
        """
        now = self._runtime.clock.now
        give_up_at, called_at = now() + patience_s, now()
        pause_s, hedged = self._hedge_s, False
        calls = set[asyncio.Task[EncodeReply | EngineError]]()
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    hedges = bool(calls) and not hedged and self._lost_calls.live_count > 1
                    if hedges or not calls or self._lost_calls.may_be_lost(called_at):
                        hedged, called_at = hedged or hedges, now()
                        calls.add(group.create_task(self._call(request)))
                    done, calls = await asyncio.wait(
                        calls, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    for call in done:
                        outcome = call.result()
                        late = now() >= give_up_at
                        retryable = isinstance(outcome, Unavailable | Overloaded)
                        if not retryable or (late and not calls):
                            return outcome
                    if not calls:
                        await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            finally:
                for call in calls:
                    call.cancel()
                if calls:
                    self._cancel(request.request_id)

    def _cancel(self, request_id: RequestId) -> None:
        try:
            self._runtime.bus.publish(
                CANCEL_ENCODE, CancelEncode(request_id=request_id), model=self._model
            )
        except Unavailable as error:  # the text is tokenized in vain, which is harmless
            log.info("tokenizers not reached", extra={"code": error.code})

    async def _call(self, request: EncodeRequest) -> EncodeReply | EngineError:
        left_s = min(remaining_s(request.deadline_unix_ms, self._runtime.clock), _WAIT_MAX_S)
        request = msgspec.structs.replace(request, left_ms=round(left_s * 1000))
        try:
            return await self._runtime.bus.call(
                TOKENIZE, request, timeout_s=left_s, model=self._model
            )
        except EngineError as error:
            return error


def truncated(encoded: EncodeReply, tokens: int) -> EncodeReply:
    """Keep the first tokens of a prompt, and the other fields of the reply that still apply."""
    return msgspec.structs.replace(
        encoded,
        token_ids=encoded.token_ids[: tokens * TOKEN_BYTES],
        block_digests=encoded.block_digests[: tokens // BLOCK_TOKENS * DIGEST_BYTES],
        text_end="",
        untruncated_tokens=encoded.untruncated_tokens or id_count(encoded.token_ids),
    )


def _check_length(gen_request: GenerationRequest, card: EncodeReply, *, truncate: bool) -> None:
    """Reject a text that cannot fit the context however it is tokenized, without a call."""
    texts = (gen_request.prompt, gen_request.text_pair, gen_request.suffix)
    length = sum(len(text) for text in texts if text is not None)
    length += sum(len(message.content) for message in gen_request.messages or ())
    most = characters_max(card.context_tokens, card.token_characters, truncate=truncate)
    if card.token_characters and length > most:
        raise PromptTooLong.of_characters(
            characters=length,
            context_tokens=card.context_tokens,
            token_characters=card.token_characters,
            truncated_max=most if truncate else None,
            param="prompt" if gen_request.messages is None else "messages",
        )


def _public_error(error: EngineError) -> EngineError:
    """Describe the failure without naming internals of the bus."""
    if isinstance(error, DeadlineExceeded):
        return Unavailable("no tokenizer replied in time", retry_after_s=1.0)
    if isinstance(error, Unavailable):
        return Unavailable("no tokenizer is available", retry_after_s=error.retry_after_s or 1.0)
    return error


class LostCalls:
    """Tracks the tokenizers. The receiver of a call is unknown, so every one counts."""

    def __init__(self, runtime: Runtime) -> None:
        self._peers = runtime.peers
        self._clock = runtime.clock
        service, scheduler = runtime.settings.service, runtime.settings.scheduler
        self._silence_s = service.heartbeat_s * scheduler.dead_beats
        self._until = -STALE_S
        self._peers.watch(self._on_peer)

    @property
    def live_count(self) -> int:
        return len(self._peers.accepting_work(Role.TOKENIZER))

    def may_be_lost(self, called_at: float) -> bool:
        """Whether a call sent at `called_at` may have gone to a process that is stale or gone.

        While no process is alive, stale ones may merely be busy and there is no other to call. If
        no process is left at all, the broker reports it.
        """
        if not self.live_count:
            return False
        tokenizers = self._peers.with_role(Role.TOKENIZER)
        silent = any(peer.liveness is not Liveness.ALIVE for peer in tokenizers)
        return silent or called_at <= self._until

    def _on_peer(self, change: PeerChange, peer: Peer) -> None:
        """Record a death. A process that drained has answered its calls."""
        beat = peer.heartbeat
        if change is not PeerChange.DIED or beat.role != Role.TOKENIZER:
            return
        if beat.state is ProcessState.DRAINING:
            return
        # The previous incarnation of a restarted process lost its calls and receives no more.
        came_back = self._peers.age_s(peer) < self._silence_s
        self._until = max(self._until, self._clock.now() + (0.0 if came_back else STALE_S))


class TemplateDefaults:
    """Fills in variables that a request does not set; the request's take precedence key by key."""

    def __init__(self, text: str) -> None:
        self._kwargs = read_template_kwargs(text)

    def filled(self, gen_request: GenerationRequest) -> GenerationRequest:
        if (variables := self._own_variables(gen_request)) is None:
            return gen_request
        options = msgspec.json.encode(self._kwargs | variables).decode()
        template = msgspec.structs.replace(gen_request.template, options=options)
        return msgspec.structs.replace(gen_request, template=template)

    def with_reasoning_default(self, gen_request: GenerationRequest) -> GenerationRequest:
        """Apply a default that turns reasoning on or off as if the request had set it."""
        reasoning, variables = gen_request.reasoning, self._own_variables(gen_request)
        if reasoning is None or variables is None or reasoning.enabled is not None:
            return gen_request
        switch = reasoning.format.switch
        default = None if switch is None or switch in variables else self._kwargs.get(switch)
        if not isinstance(default, bool):
            return gen_request
        return msgspec.structs.replace(
            gen_request, reasoning=msgspec.structs.replace(reasoning, enabled=default)
        )

    def _own_variables(self, gen_request: GenerationRequest) -> dict[str, msgspec.Raw] | None:
        """Return the request's variables, or None if no default can apply."""
        if not self._kwargs or gen_request.messages is None:
            return None
        try:
            return msgspec.json.decode(
                gen_request.template.options or "{}", type=dict[str, msgspec.Raw]
            )
        except msgspec.DecodeError:
            return None  # the tokenizer rejects it and names the field
