"""Client of the tokenizer service: prompts and texts, and the metadata of the model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.gateway import read_template_kwargs
from antiphon.gateway.parsing.formats import Formats, formats_of
from antiphon.gateway.requests.generation_request import check_token_ids
from antiphon.gateway.requests.tokenizer_calls import DECODES, ENCODES, TokenizerCalls
from antiphon.service.clock import deadline_in, remaining_s
from antiphon.wire.codec import id_count, pack_ids, unpack_ids
from antiphon.wire.digests import BLOCK_TOKENS, DIGEST_BYTES, TOKEN_BYTES
from antiphon.wire.errors import (
    DeadlineExceeded,
    EngineError,
    PromptTooLong,
    Unavailable,
)
from antiphon.wire.ids import ModelName, RequestId, new_request_id
from antiphon.wire.namespaces import PageOrigin, prompt_digests
from antiphon.wire.tokenize import (
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
_DECODE_S = 10.0


class TokenizerClient:
    """What the gateway asks tokenizers for. Slow and lost calls are repeated."""

    def __init__(self, runtime: Runtime, model: ModelName) -> None:
        self._runtime = runtime
        self._model = model
        self.template_defaults = TemplateDefaults(runtime.settings.gateway.chat_template_kwargs)
        self._calls = TokenizerCalls(runtime, model)
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
            transcription=gen_request.transcription,
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
        outcome = await self._calls.call(DECODES, request, CARD_TIMEOUT_S)
        if isinstance(outcome, EngineError):
            raise _public_error(outcome)
        return outcome.texts

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
        outcome = await self._calls.call(ENCODES, request, patience_s)
        if not isinstance(outcome, EngineError):
            return outcome
        if remaining_s(request.deadline_unix_ms, self._runtime.clock) <= 0:
            raise DeadlineExceeded("the request's deadline has passed")
        raise _public_error(outcome)


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
