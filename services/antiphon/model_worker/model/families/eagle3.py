"""EAGLE-3's draft head of a Llama-like layer, as SpecForge and the authors' code write it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.model_worker.model.errors import ModelLoadError, UnsupportedVariant
from antiphon.model_worker.model.llama_parts import Count, attention, gated, model, rms_norm
from antiphon.model_worker.model.spec import (
    DraftHeadSpec,
    EmbeddingSpec,
    LayerSpec,
    ModelFamily,
    ModelSpec,
)
from antiphon.resolve.memory import AUX_LAYERS

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile


class _EagleConfig(msgspec.Struct, frozen=True):
    eagle_aux_hidden_state_layer_ids: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    use_aux_hidden_state: bool = True


class _Fields(msgspec.Struct, frozen=True):
    draft_vocab_size: Count | None = None
    target_hidden_size: Count | None = None
    eagle_config: _EagleConfig = _EagleConfig()


def _declare(config: ConfigFile) -> ModelSpec:
    fields = config.family_fields(_Fields)
    eagle = fields.eagle_config
    if config.num_hidden_layers != 1:
        raise UnsupportedVariant(
            f"config.json: a draft head of {config.num_hidden_layers} layers is not supported"
        )
    if not eagle.use_aux_hidden_state:
        raise UnsupportedVariant(
            "config.json: eagle_config.use_aux_hidden_state: a head that reads the last hidden "
            "state only is not supported"
        )
    drafted = fields.draft_vocab_size or config.vocab_size
    if drafted > config.vocab_size:
        raise ModelLoadError(
            f"config.json: draft_vocab_size {drafted} exceeds vocab_size {config.vocab_size}"
        )
    ids = eagle.eagle_aux_hidden_state_layer_ids
    head = DraftHeadSpec(
        target_hidden=fields.target_hidden_size or config.hidden_size,
        # The config names layers by their outputs, which enter the next ones.
        aux_layers=None if ids is None else tuple(index + 1 for index in ids),
        aux_count=AUX_LAYERS if ids is None else len(ids),
        vocabulary=drafted,
    )
    layer = LayerSpec(
        mixer=attention(config, bias=config.attention_bias, inputs=2 * config.hidden_size),
        feed_forward=gated(config, bias=config.mlp_bias),
        norm=rms_norm(config),
    )
    return model(
        config,
        layer,
        embedding=EmbeddingSpec(name="embed_tokens"),
        norm_name="norm",
        layer_name="midlayer",
        draft_head=head,
    )


EAGLE3 = ModelFamily("EAGLE-3 (Llama)", _declare)
