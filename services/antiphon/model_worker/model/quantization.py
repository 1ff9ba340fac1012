"""Which linears of a checkpoint are quantized, and in which layout."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import antiphon.config.quantization as schemes
from antiphon.layers.quantization.eight_bit import (
    Fp8Storage,
    Int8Storage,
    LlmInt8Storage,
    OnlineFp8Storage,
    TorchaoInt8Storage,
)
from antiphon.layers.quantization.four_bit import (
    BitsAndBytesStorage,
    Mxfp4Storage,
    TorchaoInt4Storage,
)
from antiphon.layers.quantization.word_packed import AwqStorage, GptqStorage, PackQuantizedStorage
from antiphon.layers.weights import CheckpointQuantization
from antiphon.model_worker.model.spec import HeadSpec, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.layers.methods import LinearMethod
    from antiphon.layers.quantization.storage import StorageLayout

LAYOUTS: Mapping[type[schemes.QuantizationScheme], type[Any]] = {
    schemes.Fp8: Fp8Storage,
    schemes.OnlineFp8: OnlineFp8Storage,
    schemes.Int8: Int8Storage,
    schemes.LlmInt8: LlmInt8Storage,
    schemes.TorchaoInt8: TorchaoInt8Storage,
    schemes.TorchaoInt4: TorchaoInt4Storage,
    schemes.Awq: AwqStorage,
    schemes.Gptq: GptqStorage,
    schemes.Packed: PackQuantizedStorage,
    schemes.BitsAndBytes4: BitsAndBytesStorage,
    schemes.Mxfp4: Mxfp4Storage,
}
"""The layout of each scheme, whose fields are those of the scheme by name."""


def storage_of(scheme: schemes.QuantizationScheme) -> StorageLayout:
    layout = LAYOUTS[type(scheme)]
    return layout(**{field.name: getattr(scheme, field.name) for field in fields(layout)})


def quantized_linears(
    config: schemes.QuantizationConfig, spec: ModelSpec, method: LinearMethod
) -> CheckpointQuantization:
    """What a model's layers need to know of the quantization of config.json or of the settings."""
    return CheckpointQuantization(method, partial(_storage, config, spec))


def _storage(
    config: schemes.QuantizationConfig, spec: ModelSpec, name: str
) -> StorageLayout | None:
    head = isinstance(spec.head, HeadSpec) and name == spec.head.name
    # The embedding table is never quantized.
    if name == spec.embedding.name or (head and not config.head):
        return None
    scheme = config.scheme(name)
    return None if scheme is None else storage_of(scheme)
