"""Every quantization method: how a checkpoint of it is made, and what a wrong reader would do.

A new method joins all tests by its row. Where a public tool makes its checkpoints and runs here, it
makes the tensors and says what the weights are; else they are packed by hand (`packing`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from tests.models.quantization.packing import awq_words, gptq_columns, gptq_rows
from tests.models.tiny import write_llama
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

SHAPE: Mapping[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Blocks of 128 end in the middle of the feed-forward block; groups of 64 do not."""
SKIPPED = "model.layers.1.mlp.down_proj"
"""The linear that every checkpoint leaves in plain numbers, by its config."""
SIZES = {"q_proj": 1.0, "k_proj": 2.0, "v_proj": 0.5, "gate_proj": 0.5, "up_proj": 3.0}
"""How much larger linears are that run as one, so that a mix-up of their scales shows."""

Stored = dict[str, "Tensor"]
Change = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True)
class Made:
    """One linear: its tensors in the checkpoint by suffix, and its weight (O, I) float32."""

    stored: Stored
    whole: Tensor


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        config: `quantization_config`; None: the checkpoint is of plain numbers.
        make: Rounds a weight (O, I).
        mutants: What a wrong reader makes of tensors, by suffix; each must change the weights.
        said: `--quantization`, where the operator has to say it.
        skipped: The field of the config that names linears to leave alone; empty: none does.
        kept: How the plan keeps it on a CPU.
    """

    name: str
    config: Mapping[str, object] | None
    make: Callable[[Tensor], Made]
    mutants: Mapping[str, Mapping[str, Change]] = field(default_factory=dict)
    said: str | None = None
    skipped: str = "modules_to_not_convert"
    kept: str = "packed"


def write(folder: Path, row: Row) -> tuple[Path, Path]:
    """Write a checkpoint of the method, and one of plain numbers that says the same.

    Returns:
        The folders of both.
    """
    plain, stored = write_llama(folder / "plain", SHAPE), folder / "stored"
    tensors = {n: t for f in plain.glob("*.safetensors") for n, t in load_file(f).items()}
    for file in (*plain.glob("*.safetensors*"),):
        file.unlink()
    torch.manual_seed(0)
    kept: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        module = name.removesuffix(".weight")
        skipped = module == SKIPPED and row.skipped
        if not name.endswith("_proj.weight") or skipped:
            kept[name] = tensor
            continue
        # Small enough that no softmax saturates, where roundings of float32 would grow.
        weight = tensor * SIZES.get(module.rpartition(".")[2], 1.0) / 4
        made = row.make(weight)
        tensors[name] = made.whole.contiguous()
        kept |= {module + suffix: part.contiguous() for suffix, part in made.stored.items()}
    config = json.loads((plain / "config.json").read_text())
    stored.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(kept, stored / "model.safetensors", metadata={"format": "pt"})
    if row.config is not None:
        said = dict(row.config) | ({row.skipped: [SKIPPED, "lm_head"]} if row.skipped else {})
        config["quantization_config"] = said
    (stored / "config.json").write_text(json.dumps(config))
    return stored, plain


# What a wrong reader would do


def first_last(tensor: Tensor) -> Tensor:
    """Outputs, or groups, in the wrong order."""
    return tensor.flip(0)


def transposed(tensor: Tensor) -> Tensor:
    """Where that is possible; others are turned round."""
    square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
    return tensor.t().contiguous() if square else tensor.flip(0)


def swapped(words: Tensor) -> Tensor:
    """The two halves of each byte the other way round."""
    flat = words.contiguous().view(torch.uint8)
    return ((flat << 4) | (flat >> 4)).view(words.dtype)


def one_more(words: Tensor) -> Tensor:
    """Each number of four bits in a word one larger, modulo 16."""
    flat = words.contiguous().view(torch.uint8)
    low, high = (flat + 1) & 15, ((flat >> 4) + 1) & 15
    return (low | (high << 4)).view(words.dtype)


def in_order(group: int) -> Change:
    """Groups of inputs as if they had never been reordered."""
    return lambda of: (torch.arange(len(of)) // group).to(of.dtype)


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


def compressed_config(
    format_: str, weights: Mapping[str, object], **activations: object
) -> dict[str, object]:
    group: dict[str, object] = {"targets": ["Linear"], "weights": dict(weights)}
    if activations:
        group["input_activations"] = activations
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


TOKENS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}


def compressed_row(
    name: str,
    format_: str,
    weights: Mapping[str, object],
    mutants: Mapping[str, Mapping[str, Change]],
    activations: Mapping[str, object] | None = None,
    kept: str = "packed",
) -> Row:
    return Row(
        f"compressed-tensors {name}",
        compressed_config(format_, weights, **(activations or {})),
        compressed(format_, **weights),
        mutants,
        skipped="ignore",
        kept=kept,
    )


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


def gptq_config(**said: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, **said}


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


NIBBLES: Mapping[str, Change] = {".weight": swapped}
ROWS: tuple[Row, ...] = (
    Row(
        "fp8 block",
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        fp8_block,
        {"scales transposed": {".weight_scale": transposed}},
    ),
    Row(
        "fp8 tensor",
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8_tensor(".weight_scale"),
        {"scale inverted": {".weight_scale": torch.reciprocal}},
    ),
    Row(
        "fp8 tensor of transformers",
        {"quant_method": "fp8"},
        fp8_tensor(".weight_scale_inv"),
        {"scale inverted": {".weight_scale": torch.reciprocal}},
    ),
    Row(
        "fp8 online",
        None,
        fp8_online,
        {"inputs for outputs": {".weight": lambda weight: weight.roll(1, 1)}},
        said="fp8",
        skipped="",
    ),
    Row(
        "w8a8_int8",
        {"quant_method": "w8a8_int8"},
        w8a8,
        {"scales turned": {".weight_scale": first_last}},
        skipped="ignore",
        kept="int8_dynamic",
    ),
    Row(
        "w8a8_int8 by flag",
        None,
        w8a8,
        {"scales turned": {".weight_scale": first_last}},
        said="w8a8_int8",
        skipped="",
        kept="int8_dynamic",
    ),
    Row(
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
        awq,
        {
            "zero off by one": {".qzeros": one_more},
            "nibbles swapped": {".qweight": swapped},
            "groups turned": {".scales": first_last},
        },
    ),
    *(
        Row(
            f"gptq {name}",
            gptq_config(**config),
            make,
            {
                "zero off by one": {".qzeros": lambda zeros: zeros + 1},
                "nibbles swapped": {".qweight": swapped},
                "groups turned": {".scales": lambda scales: scales.flip(1)},
                **({"order ignored": {".g_idx": in_order(64)}} if "desc_act" in config else {}),
            },
        )
        for name, config, make in (
            ("asymmetric", {}, gptq()),
            ("symmetric", {"sym": True}, gptq(sym=True)),
            ("in order of size", {"desc_act": True}, gptq(order=True)),
            ("version 2", {"checkpoint_format": "gptq_v2"}, gptq(version=2)),
            ("8 bits", {"bits": 8, "group_size": -1}, gptq(8, -1)),
            ("2 bits", {"bits": 2}, gptq(2)),
        )
    ),
    compressed_row(
        "W8A8 int8",
        "int-quantized",
        CHANNEL,
        {"scales turned": {".weight_scale": first_last}},
        TOKENS,
        kept="int8_dynamic",
    ),
    compressed_row(
        "W8A8 int8, one scale",
        "int-quantized",
        CHANNEL | {"strategy": "tensor"},
        {"scale inverted": {".weight_scale": torch.reciprocal}},
        TOKENS,
        kept="int8_dynamic",
    ),
    compressed_row(
        "W8 int8 in groups",
        "int-quantized",
        CHANNEL | {"strategy": "group", "group_size": 64},
        {"scales turned": {".weight_scale": first_last}},
        TOKENS,
    ),
    compressed_row(
        "W8 int8 with zeros",
        "int-quantized",
        CHANNEL | {"symmetric": False},
        {"zero off by one": {".weight_zero_point": lambda zeros: zeros + 1}},
        TOKENS,
    ),
    compressed_row(
        "W8A16 packed",
        "pack-quantized",
        CHANNEL,
        {
            "bytes in another order": {
                ".weight_packed": lambda w: (
                    w.view(torch.int16).roll(1, 1).contiguous().view(torch.int32)
                )
            }
        },
    ),
    compressed_row(
        "W4A16 packed",
        "pack-quantized",
        GROUPS,
        {
            "nibbles swapped": {".weight_packed": swapped},
            "scales turned": {".weight_scale": first_last},
        },
    ),
    compressed_row(
        "W4A16 packed with zeros",
        "pack-quantized",
        GROUPS | {"symmetric": False},
        {
            "zero off by one": {".weight_zero_point": one_more},
            "nibbles swapped": {".weight_packed": swapped},
        },
    ),
    Row(
        "compressed-tensors W4A16 packed in order of size",
        compressed_config("pack-quantized", GROUPS | {"actorder": "group"}),
        packed_in_order_of_size,
        {"order ignored": {".weight_g_idx": in_order(64)}},
        skipped="ignore",
    ),
    compressed_row(
        "FP8", "float-quantized", FLOATS, {"scales turned": {".weight_scale": first_last}}
    ),
    compressed_row(
        "FP8 blocks",
        "float-quantized",
        FLOATS | {"strategy": "block", "block_structure": [128, 128]},
        {"scales transposed": {".weight_scale": transposed}},
    ),
    *(
        Row(
            f"bitsandbytes {kind}{', nested' if nested else ''}",
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_quant_type": kind,
                "bnb_4bit_use_double_quant": nested,
            },
            bits_and_bytes(kind, nested=nested),
            {
                "nibbles swapped": NIBBLES,
                "magnitudes turned": {".weight.absmax": first_last},
            },
            skipped="llm_int8_skip_modules",
        )
        for kind, nested in (("nf4", False), ("nf4", True), ("fp4", False))
    ),
    Row(
        "bitsandbytes int8",
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        llm_int8,
        {"magnitudes turned": {".SCB": first_last}},
        skipped="llm_int8_skip_modules",
        kept="int8",
    ),
    Row(
        "mxfp4",
        {"quant_method": "mxfp4"},
        mxfp4,
        {
            "nibbles swapped": {"_blocks": swapped},
            "exponent off by one": {"_scales": lambda scales: scales + 1},
        },
    ),
    Row(
        "torchao int8wo",
        None,
        torchao_int8,
        {"inputs for outputs": {".weight": lambda weight: weight.roll(1, 1)}},
        said="torchao-int8wo",
        skipped="",
        kept="int8",
    ),
)
