"""The spec of each row of the families, and specs with a part of every layer changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec
from tests.models import (
    families,
    families_judges,
    families_moe,
    families_seeing,
    families_transcribing,
)

from antiphon.layers.attention import AttentionSpec
from antiphon.model_worker.model.config_file import read_config
from antiphon.model_worker.model.llama_parts import read_spec
from antiphon.model_worker.model.registry import find_family

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.models.families import Row

    from antiphon.model_worker.model.spec import LayerSpec, ModelSpec

ROWS = families.ROWS + families_moe.ROWS + families_seeing.ROWS
"""Of the families that generate text."""
EVERY = (
    *(ROWS + families_seeing.AREAS + families_judges.ROWS + families_judges.TWO_TOWERS),
    *families_transcribing.ROWS,
)
BY_NAME = {row.name: row for row in EVERY}


def spec_of(row: Row) -> ModelSpec:
    """As the row's config is declared; nothing is loaded."""
    with TemporaryDirectory() as folder:
        config = row.made()
        config.architectures = [row.architecture.__name__]
        config.save_pretrained(folder)
        read = read_config(Path(folder))
    return read_spec(find_family(read.architectures), read)


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
