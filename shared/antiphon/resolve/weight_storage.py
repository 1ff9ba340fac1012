"""Storage of quantized linear layers in memory, and the size of all weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.model import Dtype, LinearFormat
from antiphon.config.quantization import GPU_KERNELS, QuantizationConfig, choose_quantization
from antiphon.model_card.card import item_bytes
from antiphon.model_card.memory import gib, weight_bytes
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.config.settings import Settings
    from antiphon.model_card.card import ModelCard


class WeightStorage(msgspec.Struct, frozen=True):
    """The resolved storage of weights.

    Attributes:
        quantization: Quantization of the checkpoint, or at load time.
        quantized: Format of quantized linear layers; others have the plan's `linear` format.
        bytes: Size of all weights.
    """

    quantization: ResolvedValue[str]
    quantized: ResolvedValue[LinearFormat]
    bytes: ResolvedValue[int]

    @property
    def numerics(self) -> Mapping[str, str]:
        """What the numerics depend on here, by name."""
        if self.quantization.value in ("none", "gguf"):
            return {}
        return {"quantized": f"{self.quantization.value} as {self.quantized.value}"}


def resolve_weight_storage(
    settings: Settings, card: ModelCard, dtype: Dtype, linear: ResolvedValue[LinearFormat]
) -> WeightStorage:
    """Resolve the format of quantized linear layers: int8 where that is exact.

    Raises:
        ConfigError: The configured method differs from the checkpoint's.
    """
    quantization = choose_quantization(
        card.quantization, settings.model.quantization, gguf=card.gguf
    )
    count = _count(card, quantization)
    quantized = _quantized(settings, quantization, linear, dtype, count)
    taken = weight_bytes(card, dtype, linear.value, quantized=quantized.value, count=count)
    of = f", {count} of them quantized" if count else ""
    return WeightStorage(
        _quantization(settings, card, quantization),
        quantized,
        ResolvedValue(taken, f"{card.weights.count} parameters{of}"),
    )


def _quantization(
    settings: Settings, card: ModelCard, quantization: QuantizationConfig | None
) -> ResolvedValue[str]:
    said = settings.model.quantization
    if quantization is None:
        if card.gguf:
            return ResolvedValue("gguf", "each tensor of the file has its own type")
        return ResolvedValue("none", "the checkpoint is not quantized")
    name = str(quantization.method)
    if said in GPU_KERNELS:
        return ResolvedValue(name, f"{said} is a GPU kernel; the weights are in {name} format")
    if quantization.online:
        return ResolvedValue(name, "model.quantization: weights are quantized while loading")
    return ResolvedValue(name, "config.json" if card.quantization else "model.quantization")


def _count(card: ModelCard, quantization: QuantizationConfig | None) -> int:
    """Number of weights in quantized linear layers."""
    if quantization is None or not quantization.online:
        return card.weights.quantized
    tables = (1 if card.tied else 2) * card.vocabulary_size * card.hidden_size
    return max(card.weights.count - tables, 0)


def _quantized(
    settings: Settings,
    quantization: QuantizationConfig | None,
    linear: ResolvedValue[LinearFormat],
    dtype: Dtype,
    count: int,
) -> ResolvedValue[LinearFormat]:
    if quantization is None:
        return ResolvedValue(linear.value, "model.linear")
    if settings.model.linear is not LinearFormat.AUTO or linear.value is LinearFormat.PLAIN:
        return ResolvedValue(linear.value, linear.reason)
    if quantization.int8_exact and quantization.dynamic_activations:
        reason = "int8 as stored; activations are quantized to int8, as the checkpoint specifies"
        return ResolvedValue(LinearFormat.INT8_DYNAMIC, reason)
    if quantization.int8_exact:
        return ResolvedValue(LinearFormat.INT8, "int8 as stored; activations are not quantized")
    taken, rounded = gib(count * item_bytes(dtype)), gib(count)
    return ResolvedValue(
        linear.value,
        f"converted to {dtype} while loading, {taken}; model.linear = int8 would take {rounded}",
    )
