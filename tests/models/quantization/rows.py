"""Every quantization method: how a checkpoint of it is made, and what a wrong reader would do.

A new method joins all tests by its row. Where a public tool makes its checkpoints and runs here, it
makes the tensors and says what the weights are; else they are packed by hand (`packing`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tests.models.quantization.made import (
    GROUPS,
    Made,
    awq,
    bits_and_bytes,
    compressed,
    fp8_block,
    fp8_online,
    fp8_tensor,
    gptq,
    llm_int8,
    mxfp4,
    nvfp4,
    packed_in_order_of_size,
    torchao_int4,
    torchao_int8,
    w8a8,
)
from tests.models.tiny import write_llama
from tests.support.models import take_tensors

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

Change = Callable[["Tensor"], "Tensor"]


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
        grouped_bytes: Bytes of a weight whose codes and scales are kept; scales of whole outputs
            do not count.
        limit: Greatest difference of logits from those of a model in float32 with the weights that
            the method makes, in their standard deviations.
        rounded: The standard deviation of that difference where activations are rounded too; 0:
            they never are.
    """

    name: str
    config: Mapping[str, object] | None
    make: Callable[[Tensor], Made]
    mutants: Mapping[str, Mapping[str, Change]] = field(default_factory=dict)
    said: str | None = None
    skipped: str = "modules_to_not_convert"
    kept: str = "packed"
    grouped_bytes: float = 0.0
    limit: float = 2e-5
    rounded: float = 0.0


def write(folder: Path, row: Row, shape: Mapping[str, object] = SHAPE) -> tuple[Path, Path]:
    """Write a checkpoint of the method, and one of plain numbers that says the same.

    Returns:
        The folders of both.
    """
    plain, stored = write_llama(folder / "plain", shape), folder / "stored"
    tensors = take_tensors(plain)
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


def rolled(words: Tensor) -> Tensor:
    """The halves of each word, one place further."""
    return words.view(torch.int16).roll(1, 1).contiguous().view(torch.int32)


def one_more(words: Tensor) -> Tensor:
    """Each number of four bits in a word one larger, modulo 16."""
    flat = words.contiguous().view(torch.uint8)
    low, high = (flat + 1) & 15, ((flat >> 4) + 1) & 15
    return (low | (high << 4)).view(words.dtype)


def in_order(group: int) -> Change:
    """Groups of inputs as if they had never been reordered."""
    return lambda of: (torch.arange(len(of)) // group).to(of.dtype)


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

NV_GROUPS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def compressed_row(
    name: str,
    format_: str,
    weights: Mapping[str, object],
    mutants: Mapping[str, Mapping[str, Change]],
    activations: Mapping[str, object] | None = None,
    kept: str = "packed",
    rounded: float = 0.0,
    grouped_bytes: float = 0.0,
) -> Row:
    return Row(
        f"compressed-tensors {name}",
        compressed_config(format_, weights, **(activations or {})),
        compressed(format_, **weights),
        mutants,
        skipped="ignore",
        kept="grouped" if grouped_bytes else kept,
        grouped_bytes=grouped_bytes,
        rounded=rounded,
    )


def gptq_config(**said: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, **said}


NIBBLES: Mapping[str, Change] = {".weight": swapped}
SCALES_TURNED: Mapping[str, Mapping[str, Change]] = {"scales turned": {".weight_scale": first_last}}
INPUTS_TURNED: Mapping[str, Mapping[str, Change]] = {
    "inputs for outputs": {".weight": lambda weight: weight.roll(1, 1)}
}
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
    Row("fp8 online", None, fp8_online, INPUTS_TURNED, said="fp8", skipped=""),
    Row(
        "w8a8_int8",
        {"quant_method": "w8a8_int8"},
        w8a8,
        SCALES_TURNED,
        skipped="ignore",
        kept="int8_dynamic",
        rounded=0.1,
    ),
    Row(
        "w8a8_int8 by flag",
        None,
        w8a8,
        SCALES_TURNED,
        said="w8a8_int8",
        skipped="",
        kept="int8_dynamic",
        rounded=0.1,
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
        kept="grouped",
        grouped_bytes=0.5 + 4 / 64,
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
            kept="packed" if "desc_act" in config else "grouped",
            grouped_bytes=size,
        )
        for name, config, make, size in (
            ("asymmetric", {}, gptq(), 0.5 + 4 / 64),
            ("symmetric", {"sym": True}, gptq(sym=True), 0.5 + 4 / 64),
            ("in order of size", {"desc_act": True}, gptq(order=True), 0.0),
            ("version 2", {"checkpoint_format": "gptq_v2"}, gptq(version=2), 0.5 + 4 / 64),
            ("8 bits", {"bits": 8, "group_size": -1}, gptq(8, -1), 1.0),
            ("2 bits", {"bits": 2}, gptq(2), 0.5 + 4 / 64),
        )
    ),
    compressed_row(
        "W8A8 int8",
        "int-quantized",
        CHANNEL,
        SCALES_TURNED,
        TOKENS,
        kept="int8_dynamic",
        rounded=0.1,
    ),
    compressed_row(
        "W8A8 int8, one scale",
        "int-quantized",
        CHANNEL | {"strategy": "tensor"},
        {"scale inverted": {".weight_scale": torch.reciprocal}},
        TOKENS,
        kept="int8_dynamic",
        rounded=0.1,
    ),
    compressed_row(
        "W8 int8 in groups",
        "int-quantized",
        CHANNEL | {"strategy": "group", "group_size": 64},
        SCALES_TURNED,
        TOKENS,
        grouped_bytes=1 + 2 / 64,
    ),
    compressed_row(
        "W8 int8 with zeros",
        "int-quantized",
        CHANNEL | {"symmetric": False},
        {"zero off by one": {".weight_zero_point": lambda zeros: zeros + 1}},
        TOKENS,
        grouped_bytes=1.0,
    ),
    compressed_row(
        "W8A16 packed",
        "pack-quantized",
        CHANNEL,
        {"bytes in another order": {".weight_packed": rolled}},
        grouped_bytes=1.0,
    ),
    compressed_row(
        "W4A16 packed",
        "pack-quantized",
        GROUPS,
        {"nibbles swapped": {".weight_packed": swapped}, **SCALES_TURNED},
        grouped_bytes=0.5 + 2 / 64,
    ),
    compressed_row(
        "W4A16 packed with zeros",
        "pack-quantized",
        GROUPS | {"symmetric": False},
        {
            "zero off by one": {".weight_zero_point": one_more},
            "nibbles swapped": {".weight_packed": swapped},
        },
        grouped_bytes=0.5 + 4 / 64,
    ),
    Row(
        "compressed-tensors W4A16 packed in order of size",
        compressed_config("pack-quantized", GROUPS | {"actorder": "group"}),
        packed_in_order_of_size,
        {"order ignored": {".weight_g_idx": in_order(64)}},
        skipped="ignore",
    ),
    compressed_row("FP8", "float-quantized", FLOATS, SCALES_TURNED),
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
            {"nibbles swapped": NIBBLES, "magnitudes turned": {".weight.absmax": first_last}},
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
        kept="grouped",
        grouped_bytes=0.5 + 2 / 32,
    ),
    *(
        Row(
            f"nvfp4 of {tool}",
            config,
            nvfp4(divides=divides),
            {
                "nibbles swapped": {weight: swapped},
                "scale of the tensor inverted": {whole: torch.reciprocal},
                **SCALES_TURNED,
            },
            skipped=skipped,
            kept="grouped",
            grouped_bytes=0.5 + 2 / 16,
        )
        for tool, config, divides, skipped, weight, whole in (
            (
                "ModelOpt",
                {"quant_method": "modelopt", "quant_algo": "NVFP4"},
                *(False, "exclude_modules", ".weight", ".weight_scale_2"),
            ),
            (
                "compressed-tensors",
                compressed_config("nvfp4-pack-quantized", NV_GROUPS),
                *(True, "ignore", ".weight_packed", ".weight_global_scale"),
            ),
        )
    ),
    Row(
        "torchao int8wo",
        None,
        torchao_int8,
        INPUTS_TURNED,
        said="torchao-int8wo",
        skipped="",
        kept="int8",
    ),
    *(
        Row(
            f"torchao int4wo in groups of {group}",
            None,
            torchao_int4(group),
            INPUTS_TURNED,
            said=f"torchao-int4wo-{group}",
            skipped="",
            kept="grouped",
            grouped_bytes=0.5 + 4 / group,
        )
        for group in (32, 64, 128)
    ),
)
BY_NAME = {row.name: row for row in ROWS}
