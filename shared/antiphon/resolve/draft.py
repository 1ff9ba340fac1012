"""The draft model of speculative decoding: how it is loaded, and which model can be one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.model import CacheDtype, Dtype, LinearFormat
from antiphon.model_card.card import ModelCard
from antiphon.model_card.config_json import Task
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from antiphon.config.settings import Settings


class DraftCard(msgspec.Struct, frozen=True):
    """What is known of a draft model before it is loaded."""

    card: ModelCard
    implementation: ResolvedValue[str]


class ResolvedDraft(msgspec.Struct, frozen=True):
    """The worker's plan for its draft model, where it differs from that for the served one."""

    model: ResolvedValue[str]
    dtype: ResolvedValue[Dtype]
    quantization: ResolvedValue[str]
    linear: ResolvedValue[LinearFormat]
    quantized: ResolvedValue[LinearFormat]
    implementation: ResolvedValue[str]
    cache_dtype: ResolvedValue[CacheDtype]
    weight_bytes: ResolvedValue[int]
    activation_bytes: ResolvedValue[int]
    token_bytes: ResolvedValue[int]
    """Bytes of a token in its KV cache, which has as many pages as that of the served model."""


def check_draft(settings: Settings, card: ModelCard, draft: ModelCard) -> None:
    """Check that a model can draft for another, as far as their cards say.

    Raises:
        ConfigError: It cannot, with the reason.
    """
    named = f"speculation.draft_model = {settings.speculation.draft_model}"
    if card.task is not Task.GENERATE or settings.model.embedding:
        raise ConfigError(
            "speculation.algorithm = standalone: the served model generates no tokens, so that "
            "there is nothing to draft; use none"
        )
    if draft.task is not Task.GENERATE or not draft.causal:
        raise ConfigError(f"{named}: {draft.architecture} does not generate text token by token")
    if draft.vocabulary_size != card.vocabulary_size:
        raise ConfigError(
            f"{named}: its vocabulary has {draft.vocabulary_size} tokens and that of the served "
            f"model {card.vocabulary_size}; draft tokens must mean the same to both"
        )
    if draft.states is not None:
        raise ConfigError(
            f"{named}: it has recurrent layers, whose state cannot go back to before a rejected "
            "draft token; use a model with attention only"
        )
    if draft.latent is not None:
        raise ConfigError(
            f"{named}: a draft model with latent attention (MLA) is not supported; use one that "
            "caches keys and values"
        )


def check_draft_context(settings: Settings, draft: ModelCard, context_tokens: int) -> None:
    """Check that a draft model can read the longest request that is served.

    Raises:
        ConfigError: It cannot, with the context length that it allows.
    """
    if draft.context_tokens < context_tokens:
        raise ConfigError(
            f"speculation.draft_model = {settings.speculation.draft_model}: its context of "
            f"{draft.context_tokens} tokens is shorter than the {context_tokens} that are served; "
            f"set model.context_tokens (--context-length) to {draft.context_tokens}, or use "
            "another draft model"
        )
