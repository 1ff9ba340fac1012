"""The draft model of speculative decoding: how it is loaded, and which model can be one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.model import CacheDtype, Dtype, LinearFormat
from antiphon.model_card.card import ModelCard
from antiphon.model_card.config_json import Task
from antiphon.model_card.served_model import draft_settings, tokenizer_path
from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.resolve.resolved_value import ResolvedValue
from antiphon.wire.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Generator

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


NO_DRAFT = ResolvedValue[ResolvedDraft | None](None, "speculation.algorithm")


@contextmanager
def naming_draft(model: str) -> Generator[None]:
    """Let config errors name the draft model: they name a file, or a setting of both models."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"speculation.draft_model = {model}: {error}") from error


def check_draft(settings: Settings, card: ModelCard, draft: ModelCard) -> None:
    """Check that a model can draft for another, as far as their cards say.

    Raises:
        ConfigError: It cannot, with the reason.
    """
    named = f"speculation.draft_model = {settings.speculation.draft_model}"
    algorithm = settings.speculation.algorithm
    if card.task is not Task.GENERATE or settings.model.embedding:
        raise ConfigError(
            f"speculation.algorithm = {algorithm}: the served model generates no tokens, so that "
            "there is nothing to draft; use none"
        )
    if algorithm == "eagle3":
        _check_draft_head(named, card, draft)
    elif draft.task is Task.DRAFT:
        raise ConfigError(
            f"{named}: {draft.architecture} is a draft head; set speculation.algorithm = eagle3 "
            "(--speculative-algorithm EAGLE3)"
        )
    elif draft.task is not Task.GENERATE or not draft.causal:
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


def _check_draft_head(named: str, card: ModelCard, draft: ModelCard) -> None:
    if draft.task is not Task.DRAFT:
        raise ConfigError(
            f"{named}: {draft.architecture} is no draft head of EAGLE-3; a model of its own drafts "
            "with speculation.algorithm = standalone (--speculative-algorithm STANDALONE)"
        )
    if draft.target_hidden_size != card.hidden_size:
        raise ConfigError(
            f"{named}: it drafts for a model with hidden states of {draft.target_hidden_size} "
            f"elements, and those of the served model have {card.hidden_size}"
        )


def check_draft_tokenizer(settings: Settings) -> None:
    """Check that the tokens of the draft model are those of the served one, by their tokenizers.

    Special tokens may differ, and one may have more tokens: drafts of these are only wrong. Nothing
    is checked without a tokenizer.json of both.

    Raises:
        ConfigError: They differ in a token.
    """
    if (own := draft_settings(settings)) is None:
        return
    with naming_draft(own.model.path):
        try:
            ours = read_vocabulary(tokenizer_path(settings)).tokens
            theirs = read_vocabulary(tokenizer_path(own)).tokens
        except Unsupported:
            return
        for token, (our, its) in enumerate(zip(ours, theirs, strict=False)):
            if our and its and our != its:
                raise ConfigError(
                    f"token {token} of its tokenizer is {its!r} and that of the served model "
                    f"{our!r}; draft tokens must mean the same to both"
                )


def check_draft_context(settings: Settings, draft: ModelCard, context_tokens: int) -> None:
    """Check that a draft model can read the longest request that is served.

    Configs of draft heads say how long the texts were that they were trained on: they draft worse
    beyond, and read on.

    Raises:
        ConfigError: It cannot, with the context length that it allows.
    """
    if draft.task is not Task.DRAFT and draft.context_tokens < context_tokens:
        raise ConfigError(
            f"speculation.draft_model = {settings.speculation.draft_model}: its context of "
            f"{draft.context_tokens} tokens is shorter than the {context_tokens} that are served; "
            f"set model.context_tokens (--context-length) to {draft.context_tokens}, or use "
            "another draft model"
        )
