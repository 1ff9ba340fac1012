"""Linears as each method stores them, made by its public tool or packed by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

if TYPE_CHECKING:
    from collections.abc import Callable


GROUPS: dict[str, object] = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 64,
    "symmetric": True,
}
"""Four bits of compressed-tensors."""

Stored = dict[str, "Tensor"]


@dataclass(frozen=True)
class Made:
    """One linear: its tensors in the checkpoint by suffix, and its weight (O, I) float32."""

    stored: Stored
    whole: Tensor


# 8-bit floats


def e4m3(wide: Tensor) -> Tensor:
    return wide.clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_block(weight: Tensor) -> Made:
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            scales[i, j] = block.abs().max() / 448 * (1 + 0.1 * i + 0.3 * j)
    spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    rounded = e4m3(weight / spread)
    whole = _dequantize_fp8_weight(rounded, scales, [128, 128], torch.float32)
    assert torch.equal(whole, rounded.float() * spread)
    return Made({".weight_scale_inv": scales, ".weight": rounded}, whole)


def fp8_tensor(suffix: str) -> Callable[[Tensor], Made]:
    def make(weight: Tensor) -> Made:
        scale = weight.abs().max() / 448
        rounded = e4m3(weight / scale)
        stored = {suffix: scale, ".weight": rounded, ".input_scale": torch.tensor(0.7)}
        return Made(stored, rounded.float() * scale)

    return make


def fp8_online(weight: Tensor) -> Made:
    scales = weight.abs().amax(dim=1, keepdim=True) / 448
    return Made({".weight": weight}, e4m3(weight / scales).float() * scales)


# bytes


def w8a8(weight: Tensor) -> Made:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    steps = (weight / scales).round().to(torch.int8)
    return Made({".weight_scale": scales, ".weight": steps}, steps * scales)


def llm_int8(weight: Tensor) -> Made:
    functional = pytest.importorskip("bitsandbytes").functional
    steps, magnitudes, _ = functional.int8_vectorwise_quant(weight.half())
    whole = steps * (magnitudes / 127)[:, None]
    # Its own function says the same, but for where it rounds.
    torch.testing.assert_close(functional.int8_vectorwise_dequant(steps, magnitudes), whole)
    stored = {
        ".SCB": magnitudes,
        ".weight_format": torch.tensor(0, dtype=torch.uint8),
        ".weight": steps,
    }
    return Made(stored, whole)


def torchao_int8(weight: Tensor) -> Made:
    quantization = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    return Made({".weight": weight}, linear.weight.dequantize())


def torchao_int4(group: int) -> Callable[[Tensor], Made]:
    """What its own tensor multiplies by, found by multiplying with one input after the other."""

    def make(weight: Tensor) -> Made:
        int4 = pytest.importorskip("torchao.prototype.quantization.int4")
        quantize_ = pytest.importorskip("torchao.quantization").quantize_
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        config = int4.PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)
        quantize_(linear, config)
        whole = linear(torch.eye(weight.shape[1])).t()
        if weight.shape[1] % group:
            assert torch.equal(whole, weight), "it is left alone"
        return Made({".weight": weight}, whole.contiguous())

    return make


# compressed-tensors


def compressed(format_: str, **arguments: object) -> Callable[[Tensor], Made]:
    """By the package itself: ranges by its own rule, then its own compressor."""

    def make(weight: Tensor) -> Made:
        said = QuantizationArgs.model_validate(arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=said)
        apart, ranges = weight, (1,)
        if said.strategy == "group":
            apart = weight.view(len(weight), -1, said.group_size or 1)
        if said.strategy == "block":
            rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
            padded = torch.zeros(128 * rows, 128 * columns)
            padded[: weight.shape[0], : weight.shape[1]] = weight
            apart, ranges = padded.view(rows, 128, columns, 128), (1, 3)
        if said.strategy == "tensor":
            least, most = weight.min().view(1), weight.max().view(1)
        elif said.strategy == "block":
            least, most = apart.amin(ranges), apart.amax(ranges)
        else:
            least, most = apart.amin(-1), apart.amax(-1)
            if said.strategy == "channel":
                least, most = least[:, None], most[:, None]
        scale, zero = calculate_qparams(least, most, said)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(format_)
        stored = compressor.compress(state, scheme)
        whole = compressor.decompress(dict(stored), scheme)["weight"]
        assert whole is not None
        named = {f".{name}": tensor for name, tensor in stored.items() if tensor is not None}
        return Made(named, whole.float())

    return make


def packed_in_order_of_size(weight: Tensor) -> Made:
    """Groups that each input names: made of the package's own, inputs shuffled."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
    made = compressed("pack-quantized", **GROUPS)(weight[:, order])
    back = order.argsort()
    steps = unpack_from_int32(made.stored[".weight_packed"], 4, weight.shape)
    stored = made.stored | {
        ".weight_packed": pack_to_int32(steps[:, back], 4),
        ".weight_g_idx": (back // 64).int(),
    }
    return Made(stored, made.whole[:, back])


# four bits


def awq(weight: Tensor) -> Made:
    outputs, inputs = weight.shape
    grouped = weight.view(outputs, -1, 64)
    least, most = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((most - least) / 15).half().float()
    zeros = (-least / scales).round().clamp(0, 15)
    steps = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    whole = (steps - zeros[..., None]) * scales[..., None]
    stored = {
        ".scales": scales.t().half(),
        ".qzeros": awq_words(zeros.t().int()),
        ".qweight": awq_words(steps.view(outputs, inputs).t().int()),
    }
    return Made(stored, whole.view(outputs, inputs))


def gptq(
    bits: int = 4, group: int = 64, *, sym: bool = False, order: bool = False, version: int = 1
) -> Callable[[Tensor], Made]:
    def make(weight: Tensor) -> Made:
        outputs, inputs = weight.shape
        size, most = group if group > 0 else inputs, (1 << bits) - 1
        back = torch.arange(inputs)
        if order:
            back = torch.randperm(inputs, generator=torch.Generator().manual_seed(5))
        of = back // size  # the group of each input
        count = inputs // size
        scales, zeros = torch.empty(count, outputs), torch.empty(count, outputs)
        for i in range(count):
            part = weight[:, of == i]
            least, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            if sym:
                high = torch.maximum(high, -least)
                least = -high
            scales[i] = ((high - least) / most).half().float()
            zeros[i] = (-least / scales[i]).round() if not sym else (most + 1) / 2
        # Version 1 keeps one less, and cannot keep a zero.
        zeros = zeros.clamp(1 if version == 1 else 0, most)
        steps = (weight.t() / scales[of] + zeros[of]).round().clamp(0, most)
        stored = {
            ".qweight": gptq_rows(steps.int(), bits),
            ".qzeros": gptq_columns((zeros - (1 if version == 1 else 0)).int(), bits),
            ".scales": scales.half(),
            ".g_idx": of.int(),
            ".bias": torch.zeros(outputs, dtype=torch.float16),
        }
        return Made(stored, ((steps - zeros[of]) * scales[of]).t())

    return make


def bits_and_bytes(kind: str, *, nested: bool) -> Callable[[Tensor], Made]:
    def make(weight: Tensor) -> Made:
        functional = pytest.importorskip("bitsandbytes").functional
        words, state = functional.quantize_4bit(
            weight, quant_type=kind, compress_statistics=nested, blocksize=64
        )
        whole = functional.dequantize_4bit(words, state)
        stored = {f".weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        return Made(stored | {".weight": words}, whole)

    return make


def mxfp4(weight: Tensor) -> Made:
    """Blocks as gpt-oss has them; what they say, by transformers."""
    outputs, inputs = weight.shape
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    grouped = weight.view(outputs, -1, 32)
    exponents = torch.log2(grouped.abs().amax(-1) / 6).ceil()
    small = grouped / torch.exp2(exponents)[..., None]
    codes = (small.abs()[..., None] - table).abs().argmin(-1) + 8 * (small < 0)
    pairs = codes.view(outputs, inputs // 32, 16, 2).to(torch.uint8)
    blocks = pairs[..., 0] | (pairs[..., 1] << 4)
    scales = (exponents + 127).to(torch.uint8)
    said = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0]
    return Made({"_blocks": blocks, "_scales": scales}, said.t())


def nvfp4(*, divides: bool) -> Callable[[Tensor], Made]:
    """Packed by hand in either form; what they say in float64, by the fields of each code."""

    def make(weight: Tensor) -> Made:
        outputs, inputs = weight.shape
        grouped = weight.view(outputs, -1, 16)
        whole = weight.abs().max() / (6 * 448)
        scales = e4m3(grouped.abs().amax(-1) / 6 / whole)
        codes = torch.arange(8)
        exponents, mantissas = codes >> 1, (codes & 1).double() / 2
        normal = (1 + mantissas) * 2.0 ** (exponents - 1)
        table = torch.where(exponents == 0, mantissas, normal)
        small = grouped.double() / (scales.double() * whole.double())[..., None]
        nearest = (small.abs()[..., None] - table).abs().argmin(-1)
        signed = (nearest + 8 * (small < 0)).view(outputs, -1, 2).to(torch.uint8)
        packed = signed[..., 0] | (signed[..., 1] << 4)
        values = torch.where(small < 0, -table[nearest], table[nearest])
        if divides:
            stored = {".weight_packed": packed, ".weight_global_scale": (1 / whole).view(1)}
            stored[".input_global_scale"] = torch.tensor([1.5])
            each = scales.double() / stored[".weight_global_scale"].double()
        else:
            stored = {".weight": packed, ".weight_scale_2": whole}
            stored[".input_scale"] = torch.tensor(0.7)
            each = scales.double() * whole.double()
        # The format's scale of a group is a number of float32.
        said = values * each.float().double()[..., None]
        stored[".weight_scale"] = scales
        return Made(stored, said.float().view(outputs, inputs))

    return make


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of a word's eight columns lies at its first four bits, its next four, and so on."""


def awq_words(steps: Tensor) -> Tensor:
    """Rows of numbers of four bits, eight columns to a word: (N, O)  ->  (N, O / 8) int32."""
    words = np.zeros((steps.shape[0], steps.shape[1] // 8), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(AWQ_ORDER):
            number = steps[:, 8 * word + column].numpy().astype(np.uint32)
            words[:, word] |= number << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def gptq_rows(steps: Tensor, bits: int) -> Tensor:
    """Consecutive inputs to a word: (I, O)  ->  (I * bits / 32, O) int32."""
    each = 32 // bits
    words = np.zeros((steps.shape[0] // each, steps.shape[1]), dtype=np.uint32)
    for row in range(steps.shape[0]):
        number = steps[row].numpy().astype(np.uint32)
        words[row // each] |= number << np.uint32(bits * (row % each))
    return torch.from_numpy(words.view(np.int32))


def gptq_columns(zeros: Tensor, bits: int) -> Tensor:
    """Consecutive outputs to a word: (G, O)  ->  (G, O * bits / 32) int32."""
    return gptq_rows(zeros.t(), bits).t().contiguous()


def q4_k(scale: float, least: float, scales: Tensor, mins: Tensor, steps: Tensor) -> bytes:
    """A block of 256: eight runs of 32, each with a scale and a minimum of six bits.

    The first four runs' six bits lie in bytes of their own; of the others, four bits lie in the
    last four bytes and two above those of the first.
    """
    packed = bytearray(12)
    for run in range(8):
        one, other = int(scales[run]), int(mins[run])
        if run < 4:
            packed[run] |= one
            packed[run + 4] |= other
        else:
            packed[run + 4] |= (one & 15) | ((other & 15) << 4)
            packed[run - 4] |= (one >> 4) << 6
            packed[run] |= (other >> 4) << 6
    nibbles = bytearray(128)
    for number, step in enumerate(steps.flatten().tolist()):
        pair, within = divmod(number, 64)
        nibbles[32 * pair + within % 32] |= step << (4 * (within // 32))
    return np.array([scale, least], dtype=np.float16).tobytes() + bytes(packed) + bytes(nibbles)


def q6_k(scale: float, scales: Tensor, steps: Tensor) -> bytes:
    """A block of 256: sixteen runs of 16 with a signed byte each, steps of six bits from -32.

    Of each half of 128, four runs of 32 share bytes: two their low four bits, all four the byte of
    their high two.
    """
    low, high = bytearray(128), bytearray(64)
    for number, step in enumerate((steps.flatten() + 32).tolist()):
        half, within = divmod(number, 128)
        quarter, lane = divmod(within, 32)
        low[64 * half + 32 * (quarter % 2) + lane] |= (step & 15) << (4 * (quarter // 2))
        high[32 * half + lane] |= (step >> 4) << (2 * quarter)
    runs = scales.to(torch.int8).numpy().tobytes()
    return bytes(low) + bytes(high) + runs + np.array([scale], dtype=np.float16).tobytes()
