"""What a client asks for, whichever door it came through; checked, and not yet encoded."""

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
"""The door of the one request that shows whether the model answers."""


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the client said of sampling; unset fields take defaults. `top_k` -1 is off."""

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
    """How a model that thinks before its answer is met.

    Attributes:
        format: How it marks its thinking.
        switched: What the request says of it; None: nothing.
        end_id: The token that ends it, if it is one token.
        call_marks: With these calls begin, which end it too.
    """

    format: ReasoningFormat
    switched: bool | None = None
    end_id: int | None = None
    call_marks: tuple[str, ...] = ()


class TokenOutputFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a client calls what it may be told of tokens."""

    ids: str = "details.ids"
    logprobs: str = "details.logprobs"
    top: str = "details.top"
    named_ids: str = "details.named_ids"
    hidden: str = "details.hidden"
    start: str = "details.prompt_start"


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Exactly one of `messages`, `prompt` and `prompt_ids` is set.

    Attributes:
        door: The API it came by, for logs.
        template: What the chat template gets beside the messages.
        prompt_field: What the client called its prompt, where its API has another name for it.
        fields: What it called other fields, where its API has other names for them.
        pair: A second text, which is read together with `prompt`.
        suffix: What comes after the gap to fill behind `prompt`.
        special_tokens: Whether a prompt of text gets those of the tokenizer.
        model: None takes the one that is served.
        tokens_max: What the client said; `tokens_field` is what it called that.
        grammar_field: What the client called the form of its answer.
        tokens_default: In place of what it did not say; None fills the context.
        choices: How many answers.
        detail_fields: What the client calls what is told of tokens.
        model_defaults: Whether the model's generation config comes before OpenAI's defaults.
        thinking: How the model thinks; its answer's form begins behind that.
        pool: The prompt becomes a vector, and nothing else is asked for.
        priority: None takes the tenant's.
        cache_salt: Who may share its cached prefixes, by `wire.digests.cache_salt`.
        timeout_s: None takes the configured one.
        private: Whether request logs and crash dumps leave it out.
        auto_truncate: Whether `gateway.allow_auto_truncate` concerns it: not where the end of the
            prompt is what is asked about, nor where the request itself says what happens.
    """

    door: str
    model: str | None
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    prompt_field: str | None = None
    fields: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    pair: str | None = None
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
    thinking: ReasoningParams | None = None
    pool: PoolParams | None = None
    priority: int | None = None
    cache_salt: bytes = b""
    tenant: TenantId = DEFAULT_TENANT
    key: ClientKey | None = None
    timeout_s: float | None = None
    traceparent: str | None = None
    private: bool = False
    auto_truncate: bool = True


def validate_request(gen_request: GenerationRequest) -> None:
    """Refuse what cannot be served whatever the model, for every door alike.

    Raises:
        InvalidRequest: Names the field.
    """
    if gen_request.continue_final_message:
        last = gen_request.messages[-1] if gen_request.messages else None
        if last is None or last.role != "assistant":
            raise InvalidRequest(
                "continue_final_message needs a last message of the assistant",
                param="continue_final_message",
            )
    check_patterns(gen_request.stop.patterns, gen_request.choices)
    grammar = gen_request.sampling.grammar
    if grammar is not None and len(grammar.text) > GRAMMAR_TEXT_MAX:
        length = len(grammar.text)
        text = f"{gen_request.grammar_field}: {length} characters; the limit is {GRAMMAR_TEXT_MAX}"
        raise InvalidRequest(text, param=gen_request.grammar_field)
