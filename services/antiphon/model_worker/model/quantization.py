"""Which linears of a checkpoint are quantized, and in which layout; read by the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from antiphon.layers.methods import LinearMethod
    from antiphon.layers.quantization.storage import StorageLayout


@dataclass(frozen=True, slots=True)
class StoredLinears:
    """The layers' `QuantizationConfig`.

    Attributes:
        config: The quantization of config.json or of the settings.
        method: Linear method for linears all of whose parts are quantized.
        embedding: Name of the embedding table, which is never quantized.
        head: Name of the head, which is quantized if the config includes it; None without a head.
    """

    config: schemes.QuantizationConfig
    method: LinearMethod
    embedding: str
    head: str | None

    def storage(self, name: str) -> StorageLayout | None:
        """The storage layout of a linear; None: not quantized."""
        if name == self.embedding or (name == self.head and not self.config.head):
            return None
        scheme = self.config.scheme(name)
        return None if scheme is None else storage_of(scheme)


def storage_of(scheme: schemes.QuantizationScheme) -> StorageLayout:
    match scheme:
        case schemes.Fp8(scale=scale, block=block):
            return Fp8Storage(scale, block)
        case schemes.OnlineFp8():
            return OnlineFp8Storage()
        case schemes.Int8(scale=scale, group=group, zero_point=zero_point):
            return Int8Storage(scale, group, zero_point)
        case schemes.LlmInt8():
            return LlmInt8Storage()
        case schemes.TorchaoInt8():
            return TorchaoInt8Storage()
        case schemes.TorchaoInt4(group=group):
            return TorchaoInt4Storage(group)
        case schemes.Awq(group=group):
            return AwqStorage(group)
        case schemes.Gptq(bits=bits, group=group, ordered=ordered, zero_added=added):
            return GptqStorage(bits, group, ordered, added)
        case schemes.Packed(bits=bits, group=group, zero_point=zero_point, ordered=ordered):
            return PackQuantizedStorage(bits, group, zero_point, ordered)
        case schemes.BitsAndBytes4(kind=kind, nested=nested):
            return BitsAndBytesStorage(kind, nested)
        case schemes.Mxfp4():
            return Mxfp4Storage()
        case _:
            raise AssertionError(f"a scheme without a layout: {type(scheme).__name__}")
