"""A model's spec with a part of every layer changed: what a mutant is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.attention import AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.model.spec import LayerSpec, ModelSpec


def attention_of(layer: LayerSpec) -> AttentionSpec:
    """The mixer of a layer that attends, and does nothing beside that."""
    assert isinstance(layer.mixer, AttentionSpec)
    return layer.mixer


def layered(spec: ModelSpec, **changes: object) -> ModelSpec:
    """Every layer changed."""
    changed = tuple(msgspec.structs.replace(layer, **changes) for layer in spec.layers)
    return msgspec.structs.replace(spec, layers=changed)


def mixed(spec: ModelSpec, **changes: object) -> ModelSpec:
    """The mixer of every layer changed."""
    changed = tuple(
        msgspec.structs.replace(layer, mixer=replace(layer.mixer, **changes))
        for layer in spec.layers
    )
    return msgspec.structs.replace(spec, layers=changed)


def windowed(spec: ModelSpec, windows: Sequence[int | None]) -> ModelSpec:
    """Each layer with a window of its own."""
    changed = tuple(
        msgspec.structs.replace(layer, mixer=replace(layer.mixer, window=window))
        for layer, window in zip(spec.layers, windows, strict=True)
    )
    return msgspec.structs.replace(spec, layers=changed)
