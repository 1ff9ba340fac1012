"""A request of any API: validated, and not yet tokenized."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
from antiphon.text.stop_patterns import check_patterns
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.grammar import GRAMMAR_TEXT_MAX, Grammar
from antiphon.wire.ids import DEFAULT_TENANT, ClientKey, TenantId
from antiphon.wire.processors import LogitProcessor
from antiphon.wire.sampling import PoolParams, StopStrings, TokenOutputParams
from antiphon.wire.tokenize import ChatMessage, TemplateParams

PROBE_API = "health"
"""API name of the request that checks whether the model generates."""


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling options of the client. Unset fields take defaults; `top_k` -1 disables it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    tokens_min: int = 0
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict[int, float])
    processors: tuple[LogitProcessor, ...] = ()
    grammar: Grammar | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    details: TokenOutputParams | None = None


class ReasoningParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to handle the reasoning of a model.

    Attributes:
        format: Reasoning format of the model.
        enabled: Whether the request enables reasoning; None if it does not set it.
        end_id: Token that ends reasoning, if it is a single token.
        call_marks: Delimiters that start a tool call, which also end reasoning.
    """

    format: ReasoningFormat
    enabled: bool | None = None
    end_id: int | None = None
    call_marks: tuple[str, ...] = ()


class TokenOutputFields(msgspec.Struct, frozen=True, kw_only=True):
    """The API's names of the token output fields, for error messages."""

    ids: str = "details.ids"
    logprobs: str = "details.logprobs"
    top: str = "details.top"
    named_ids: str = "details.named_ids"
    hidden: str = "details.hidden"
    start: str = "details.prompt_start"


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Exactly one of `messages`, `prompt` and `prompt_ids` is set.

    Attributes:
        api: API of the request, for logs.
        template: Arguments of the chat template besides the messages.
        prompt_field: The API's name of the prompt field, if it differs.
        fields: The API's names of other fields, if they differ.
        text_pair: Second text of a text pair, whose first is `prompt`.
        suffix: Text after the insertion point that follows `prompt`.
        special_tokens: Whether to add the tokenizer's special tokens to a text prompt.
        model: Model name; None for the served model.
        tokens_max: Output token limit of the client; `tokens_field` is the API's name of it.
        grammar_field: The API's name of the output constraint.
        tokens_default: Limit if `tokens_max` is unset; None fills the context.
        choices: Number of choices.
        detail_fields: The API's names of the token output fields.
        model_defaults: Whether the model's generation config takes precedence over OpenAI's
            defaults.
        reasoning: How to handle reasoning; the output constraint applies after it.
        pooling: Pooling parameters, if the prompt is pooled to a vector and nothing is generated.
        priority: Scheduling priority; None for the tenant's.
        cache_salt: Scope of prefix cache sharing, from `wire.digests.cache_salt`.
        timeout_s: Timeout; None for the configured one.
        private: Whether to exclude it from request logs and crash dumps.
        auto_truncate: Whether `gateway.allow_auto_truncate` applies. It does not if the end of the
            prompt matters (scoring), or if the request sets its own truncation.
    """

    api: str
    model: str | None
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    prompt_field: str | None = None
    fields: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    text_pair: str | None = None
    suffix: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    continue_final_message: bool = False
    template: TemplateParams = TemplateParams()
    special_tokens: bool = True
    tokens_max: int | None = None
    tokens_field: str = "max_tokens"
    tokens_default: int | None = None
    choices: int = 1
    sampling: SamplingOptions = SamplingOptions()
    grammar_field: str = "grammar"
    detail_fields: TokenOutputFields = TokenOutputFields()
    stop: StopStrings = StopStrings()
    model_defaults: bool = False
    reasoning: ReasoningParams | None = None
    pooling: PoolParams | None = None
    priority: int | None = None
    cache_salt: bytes = b""
    tenant: TenantId = DEFAULT_TENANT
    key: ClientKey | None = None
    timeout_s: float | None = None
    traceparent: str | None = None
    private: bool = False
    auto_truncate: bool = True


def validate_request(gen_request: GenerationRequest) -> None:
    """Reject requests that no model can serve, for all APIs alike.

    Raises:
        InvalidRequest: Names the field.
    """
    if gen_request.continue_final_message:
        last = gen_request.messages[-1] if gen_request.messages else None
        if last is None or last.role != "assistant":
            raise InvalidRequest(
                "continue_final_message requires a final assistant message",
                param="continue_final_message",
            )
    check_patterns(gen_request.stop.patterns, gen_request.choices)
    grammar = gen_request.sampling.grammar
    if grammar is not None and len(grammar.text) > GRAMMAR_TEXT_MAX:
        length = len(grammar.text)
        text = f"{gen_request.grammar_field}: {length} characters; the limit is {GRAMMAR_TEXT_MAX}"
        raise InvalidRequest(text, param=gen_request.grammar_field)
