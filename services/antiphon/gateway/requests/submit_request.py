"""The request that a scheduler gets: made of a validated one and its encoded prompt."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.grammars import after_thinking
from antiphon.gateway.requests.generation_request import (
    PROBE_API,
    answer_tokens,
    sampling_params,
)
from antiphon.gateway.requests.pooling import wrong_model
from antiphon.gateway.requests.tokenizer_client import truncated
from antiphon.wire.base import Role
from antiphon.wire.codec import id_count
from antiphon.wire.errors import InvalidRequest, Unavailable, Unsupported
from antiphon.wire.sampling import SamplingParams
from antiphon.wire.submit import SubmitRequest

if TYPE_CHECKING:
    from antiphon.config.gateway import PreferredSampling
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName, RequestId
    from antiphon.wire.tokenize import EncodeReply

log = logging.getLogger(__name__)

RESERVED_OUTPUT_TOKENS = 6
"""Context tokens that truncation leaves for the output, as in SGLang."""


@dataclass(frozen=True, eq=False)
class SubmitRequestBuilder:
    """Fits encoded prompts into the contexts of workers, and makes the requests of them."""

    runtime: Runtime
    model: ModelName
    preferred: PreferredSampling

    def may_truncate(self, gen_request: GenerationRequest) -> bool:
        """Whether the prompt or the token limit may be reduced to fit."""
        allowed = self.runtime.settings.gateway.allow_auto_truncate
        # A truncated fill-in-the-middle prompt would lose the suffix and its special token, and an
        # image could be cut in two.
        whole = gen_request.suffix is not None or bool(gen_request.media)
        return allowed and gen_request.auto_truncate and not whole

    def truncate_to_context(
        self, gen_request: GenerationRequest, encoded: EncodeReply
    ) -> EncodeReply:
        context_tokens = max(self._context_lengths(encoded))
        answers = gen_request.tokens_max != 0
        if (
            self.may_truncate(gen_request)
            and id_count(encoded.token_ids) + answers > context_tokens
        ):
            remaining = (
                max(1, context_tokens - RESERVED_OUTPUT_TOKENS) if answers else context_tokens
            )
            if gen_request.text_pair is None or remaining > (encoded.second_from or remaining):
                encoded = truncated(encoded, remaining)
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

    def output_tokens(self, gen_request: GenerationRequest, encoded: EncodeReply) -> int:
        """The output token limit of each choice."""
        return answer_tokens(
            gen_request,
            prompt_tokens=id_count(encoded.token_ids),
            contexts=self._context_lengths(encoded),
            preferred=self.preferred.max_new_tokens,
            truncate=self.may_truncate(gen_request),
        )

    def build(
        self,
        gen_request: GenerationRequest,
        encoded: EncodeReply,
        tokens_max: int,
        request_id: RequestId,
        deadline_unix_ms: int,
        traceparent: str | None,
    ) -> SubmitRequest:
        sampling = self._sampling(gen_request, encoded, tokens_max)
        content = (self.model, encoded.token_ids, sampling, gen_request.stop, gen_request.choices)
        return SubmitRequest(
            request_id=request_id,
            owner=self.runtime.process,
            tenant=gen_request.tenant,
            model=self.model,
            digest=hashlib.sha256(msgspec.msgpack.encode(content)).digest(),
            prompt_ids=encoded.token_ids,
            block_digests=encoded.block_digests,
            choices=gen_request.choices,
            sampling=sampling,
            stop=gen_request.stop,
            priority=gen_request.priority or 0,
            cache_salt=gen_request.cache_salt,
            deadline_unix_ms=deadline_unix_ms,
            traceparent=traceparent,
            resume=gen_request.resume,
        )

    def _sampling(
        self, gen_request: GenerationRequest, encoded: EncodeReply, tokens_max: int
    ) -> SamplingParams:
        if gen_request.pooling is not None:
            pool = msgspec.structs.replace(gen_request.pooling, second_from=encoded.second_from)
            return SamplingParams(max_new_tokens=0, pool=pool)
        least, most = gen_request.sampling.min_tokens, gen_request.tokens_max
        if most is not None and least > most:
            text = f"min_tokens is {least}, more than {gen_request.field('max_tokens')}"
            raise InvalidRequest(text, param="min_tokens")
        recommended = (
            self.runtime.settings.gateway.sampling_defaults == "model"
            and gen_request.model_defaults
        )
        return sampling_params(
            gen_request.sampling,
            *((self.preferred, encoded.defaults) if recommended else (self.preferred,)),
            tokens_max=tokens_max,
            vocabulary_size=encoded.vocabulary_size,
        )

    def _context_lengths(self, encoded: EncodeReply) -> set[int]:
        """Context length of each worker: its cache may be smaller than the model's context."""
        beats = [peer.heartbeat for peer in self.runtime.peers.with_role(Role.WORKER)]
        contexts = {
            min(encoded.context_tokens, beat.worker.context_tokens)
            for beat in beats
            if beat.worker is not None and beat.model == self.model
        }
        return contexts or {encoded.context_tokens}


def check_model_kind(gen_request: GenerationRequest, encoded: EncodeReply) -> None:
    pools = gen_request.pooling is not None
    if pools != (encoded.pooling is not None):
        raise wrong_model("embed" if pools else "generate text", encoded.pooling)


def check_transcribes(gen_request: GenerationRequest, encoded: EncodeReply) -> None:
    """Check a prompt of a model that only transcribes; those of health checks are texts.

    Raises:
        Unsupported: It is a text.
        Unavailable: An output is to end it, and the tokenizer is of a version that knows of none.
    """
    asked = gen_request.transcription
    if asked is None:
        if gen_request.api != PROBE_API:
            text = "this model transcribes audio files: use /v1/audio/transcriptions"
            raise Unsupported(text, param="model")
    elif not encoded.token_ids.endswith(asked.output):
        text = "a tokenizer of an earlier version knows no times of words"
        raise Unavailable(text, retry_after_s=1.0)


def apply_reasoning(
    gen_request: GenerationRequest, text_end: str
) -> tuple[GenerationRequest, bool]:
    """Apply the output constraint after reasoning; return whether the output starts in reasoning.

    The reasoning delimiters are included, for the worker's reasoning token count.
    """
    reasoning, grammar = gen_request.reasoning, gen_request.sampling.grammar
    if reasoning is None:
        return gen_request, False
    inside = reasoning.format.begins_inside(text_end or None, thinking=reasoning.enabled)
    marks = reasoning.format.marks(inside=inside, call_marks=reasoning.call_marks)
    gen_request = msgspec.structs.replace(
        gen_request, stop=msgspec.structs.replace(gen_request.stop, thinking=marks)
    )
    if grammar is None or reasoning.enabled is False:
        return gen_request, inside
    behind = after_thinking(grammar, reasoning.format, inside=inside, end_id=reasoning.end_id)
    sampling = msgspec.structs.replace(gen_request.sampling, grammar=behind)
    return msgspec.structs.replace(gen_request, sampling=sampling), inside


def check_logprob_start(gen_request: GenerationRequest, prompt_tokens: int) -> None:
    wanted = gen_request.sampling.details
    if wanted is not None and wanted.prompt_start > prompt_tokens:
        field = gen_request.field("details.prompt_start")
        text = (
            f"{field} ({wanted.prompt_start}) is higher than the number of input tokens "
            f"({prompt_tokens})"
        )
        raise InvalidRequest(text, param=field)
