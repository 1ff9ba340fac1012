"""Four bits: NF4 and FP4 of bitsandbytes, MXFP4, NVFP4, by table lookup; torchao's int4, by scales.

Source: Dettmers et al. 2023, arXiv:2305.14314 (NF4, nested scales); the OCP Microscaling Formats
specification 1.0 (MXFP4); gpt-oss's checkpoints (the layout of its blocks); those of
ModelOpt and compressed-tensors (NVFP4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import torch

from antiphon.kernels.cpu.linear import Grouping
from antiphon.layers.quantization.storage import (
    ANY,
    FLOATS,
    FOUR_BITS,
    Axis,
    GroupedWeight,
    LoadedWeight,
    WeightField,
    WeightFields,
    check_divisible,
    lookup,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


BLOCK = 64
"""Weights of a block in what transformers writes with bitsandbytes."""
NESTED_BLOCK = 256
"""Absmax values that share a scale."""
MX_BLOCK = 32
MX_BIAS = 127
BYTES = (torch.uint8,)
F32 = (torch.float32,)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1: a sign, two bits of exponent, one of mantissa."""
# Powers of two, which bfloat16 has in the same range.
MX_GROUPS = Grouping(4, MX_BLOCK, torch.bfloat16, minimums=False, values=FP4)

NV_BLOCK = 16
NV_GROUPS = Grouping(4, NV_BLOCK, torch.float8_e4m3fn, minimums=False, values=FP4)


class _State(msgspec.Struct):
    """The metadata that bitsandbytes stores with a weight."""

    blocksize: int
    nested_blocksize: int = NESTED_BLOCK
    nested_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class BitsAndBytesStorage:
    """Two weights a byte, the high bits first, row after row; an absmax for each 64.

    Blocks continue from row to row: one may begin in the middle of an output.
    """

    kind: Literal["nf4", "fp4"]  # of the table, which is stored with the weight
    nested: bool  # the absmax values are quantized to bytes themselves, minus their mean

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        blocks = Axis("outputs", BLOCK, inputs)
        fields = [
            WeightField(".weight.quant_map", (16,), F32),
            WeightField(f".weight.quant_state.bitsandbytes__{self.kind}", (ANY,), BYTES),
            WeightField(".weight.absmax", (blocks,), BYTES if self.nested else F32),
        ]
        if self.nested:
            scales = Axis("outputs", NESTED_BLOCK * BLOCK, inputs)
            fields.insert(0, WeightField(".weight.nested_absmax", (scales,), F32))
            fields.insert(0, WeightField(".weight.nested_quant_map", (256,), F32))
        # In one axis, so that an output is dequantized with all its inputs.
        row = Axis("inputs", inputs)
        return (*fields, WeightField(".weight", (Axis("outputs", 2, inputs), row), BYTES))

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """Multiply table values by the absmax of their block, in float32."""
        codes = unpack_nibbles(stored[".weight"].flatten(), high_first=True)[: outputs * inputs]
        wide, magnitudes = lookup(codes, stored[".weight.quant_map"]), self._magnitudes(stored)
        full = len(wide) // BLOCK
        wide[: full * BLOCK].view(full, BLOCK).mul_(magnitudes[:full, None])
        wide[full * BLOCK :].mul_(magnitudes[full:])
        return wide.view(outputs, inputs)

    def grouping(self, inputs: int) -> Grouping | None:
        # The tables of these kinds are floats that bfloat16 does not have.
        return None

    def _magnitudes(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The absmax of each block, (blocks,) float32.

        Raises:
            ValueError: The block size is not the one that all known writers use.
        """
        words = stored[f".weight.quant_state.bitsandbytes__{self.kind}"]
        state = msgspec.json.decode(words.numpy().tobytes(), type=_State)
        if state.blocksize != BLOCK or (self.nested and state.nested_blocksize != NESTED_BLOCK):
            raise ValueError(f"block size {state.blocksize} is not supported, only {BLOCK}")
        magnitudes = stored[".weight.absmax"]
        if not self.nested:
            return magnitudes
        scales = stored[".weight.nested_absmax"].repeat_interleave(NESTED_BLOCK)
        wide = lookup(magnitudes, stored[".weight.nested_quant_map"])
        return wide.mul_(scales[: len(wide)]).add_(state.nested_offset)


@dataclass(frozen=True, slots=True)
class Mxfp4Storage:
    """Two weights a byte, the low bits first, and a power of two for each 32."""

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        check_divisible(inputs, MX_BLOCK, "inputs")
        blocks = Axis("inputs", MX_BLOCK)
        return (
            WeightField("_scales", (Axis("outputs"), blocks), BYTES),
            WeightField("_blocks", (Axis("outputs"), blocks, MX_BLOCK // 2), BYTES),
        )

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> GroupedWeight:
        """E2M1 values with their powers of two, exact in float32."""
        codes = unpack_nibbles(stored["_blocks"], high_first=False)  # (O, I / 32, 32)
        scales = powers_of_two(stored["_scales"]).view(outputs, -1)
        return GroupedWeight(MX_GROUPS, codes.view(outputs, inputs), scales)

    def grouping(self, inputs: int) -> Grouping | None:
        return MX_GROUPS


@dataclass(frozen=True, slots=True)
class Nvfp4Storage:
    """Two weights a byte, the low bits first, an e4m3 scale for each 16, and one for the tensor.

    Linears that run as one keep their own: it is multiplied into the scales of groups.
    """

    divides: bool  # the scale of the tensor is stored as its reciprocal

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        check_divisible(inputs, NV_BLOCK, "inputs")
        whole, packed = self._names()
        scales = (Axis("outputs"), Axis("inputs", NV_BLOCK))
        return (
            WeightField(whole, (1,), F32),
            WeightField(".weight_scale", scales, (torch.float8_e4m3fn,)),
            WeightField(packed, (Axis("outputs"), Axis("inputs", 2)), BYTES),
        )

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> GroupedWeight:
        """E2M1 values with products of both scales.

        Raises:
            ValueError: The scale of the tensor is no positive number, or one of a group is negative
                or no number.
        """
        whole, packed = (stored[name] for name in self._names())
        if not bool((whole.isfinite() & (whole > 0)).all()):
            raise ValueError(f"{self._names()[0]} {whole.item()} is not a positive number")
        scales = stored[".weight_scale"].float()
        if not bool((scales >= 0).all()):
            raise ValueError(".weight_scale has a scale that is negative or no number")
        scales = scales / whole if self.divides else scales * whole
        each = (whole.reciprocal() if self.divides else whole).expand(outputs, 1)
        codes = unpack_nibbles(packed, high_first=False)
        return GroupedWeight(NV_GROUPS, codes, scales, tensor_scales=each)

    def grouping(self, inputs: int) -> Grouping | None:
        return NV_GROUPS

    def _names(self) -> tuple[str, str]:
        """The suffixes of the tensor's scale and of the packed weight."""
        if self.divides:
            return ".weight_global_scale", ".weight_packed"
        return ".weight_scale_2", ".weight"


@dataclass(frozen=True, slots=True)
class TorchaoInt4Storage:
    """An unquantized weight that the torchao package quantizes at load time.

    Like `PrototypeInt4WeightOnlyConfig` on a CPU: sixteen levels between the minimum and maximum
    weight of a group of inputs. A weight whose inputs are not whole groups is not quantized.
    """

    group: int

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The weight; a group is quantized as a whole, however the weight is sharded."""
        together = self.group if inputs % self.group == 0 else inputs
        return (
            WeightField(".weight", (Axis("outputs"), Axis("inputs", together=together)), FLOATS),
        )

    def grouping(self, inputs: int) -> Grouping | None:
        if inputs % self.group:
            return None
        return Grouping(4, self.group, torch.float32, minimums=True, values=FOUR_BITS)

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        """The weights that torchao's quantized values represent."""
        weight = stored[".weight"]
        if inputs % self.group:
            return weight.float()
        # Imported only when needed: it takes seconds, and need not be installed.
        from torchao.quantization import (  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
            MappingType,
            quant_primitives,
        )

        # The function that creates its CPU tensor; the tensor itself only multiplies.
        ao = cast("Any", quant_primitives)
        block, steps = [1, self.group], (torch.int32, 0, 15)
        scales, zeros = ao._choose_qparams_affine_tinygemm(  # noqa: SLF001
            weight, MappingType.ASYMMETRIC, block, *steps, 1e-6, None, weight.dtype
        )
        rounded = ao._quantize_affine_tinygemm(weight, block, scales, zeros, *steps)  # noqa: SLF001
        grouping = self.grouping(inputs)
        assert grouping is not None, "its inputs are whole groups"
        # Its kernel uses fused multiply-add, with one rounding, as `minimums` do.
        return GroupedWeight(
            grouping,
            rounded.view(outputs, inputs).to(torch.uint8),
            scales.view(outputs, -1).float(),
            minimums=zeros.view(outputs, -1).float(),
        )


def powers_of_two(exponents: Tensor) -> Tensor:
    """The scales of MXFP4: exponents (...,) uint8  ->  (...,) float32."""
    powers = exponents.int() - MX_BIAS
    return torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)


def unpack_nibbles(pairs: Tensor, *, high_first: bool) -> Tensor:
    """Unpack the two 4-bit values of each byte: (..., N) uint8  ->  (..., 2 N) uint8."""
    low, high = pairs & 15, pairs >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)
