"""What a client asks for, whichever door it came through; checked, and not yet encoded."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from antiphon.wire.grammar import Grammar
from antiphon.wire.ids import DEFAULT_TENANT, ClientKey, TenantId
from antiphon.wire.processors import LogitProcessor
from antiphon.wire.sampling import DetailParams, StopStrings
from antiphon.wire.tokenize import ChatMessage


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
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
    details: DetailParams | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Exactly one of `messages`, `prompt` and `prompt_ids` is set.

    Attributes:
        door: The API it came by, for logs.
        model: None takes the one that is served.
        tokens_max: What the client said; `tokens_field` is what it called that.
        tokens_default: In place of what it did not say; None fills the context.
        choices: How many answers.
        model_defaults: Whether the model's generation config comes before OpenAI's defaults.
        timeout_s: None takes the configured one.
    """

    door: str
    model: str | None
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    continue_final_message: bool = False
    tokens_max: int | None = None
    tokens_field: str = "max_tokens"
    tokens_default: int | None = None
    choices: int = 1
    sampling: Sampling = Sampling()
    stop: StopStrings = StopStrings()
    model_defaults: bool = False
    tenant: TenantId = DEFAULT_TENANT
    key: ClientKey | None = None
    timeout_s: float | None = None
    traceparent: str | None = None
