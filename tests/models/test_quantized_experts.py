"""Experts that are stored in few bits say what the same weights say in plain numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import families_moe
from tests.models.parity import error, logits_of, save, texts
from tests.support.models import open_model
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

BY_NAME = {row.name: row for row in families_moe.ROWS}
BLOCK = (16, 32)
"""Of fp8 weights: nothing here is as long as the usual 128."""


def says(folder: Path) -> Tensor:
    model = open_model(folder, dtype="float32")
    return logits_of(model, texts()[-1], chunk=23)


def rewrite(folder: Path, tensors: dict[str, Tensor], quantization: object) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file_of(folder))
    config = json.loads((folder / "config.json").read_text())
    said = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({**config, **said}))


def file_of(folder: Path) -> Path:
    return folder / "model.safetensors"


def test_stacked_experts_in_mxfp4(tmp_path: Path) -> None:
    """As every published gpt-oss has them."""
    save(BY_NAME["gpt-oss"], tmp_path)
    tensors, generator = load_file(file_of(tmp_path)), torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    plain = dict(tensors)
    for name, dense in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = dense
            continue
        count, inputs, outputs = dense.shape
        shape = (count, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert plain[name].shape == dense.shape
    rewrite(tmp_path, plain, None)
    want = says(tmp_path)
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    rewrite(tmp_path, stored, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    assert torch.equal(says(tmp_path), want)


@pytest.mark.parametrize("name", ["deepseek-v3", "mixtral"])
def test_separate_experts_and_latents_in_blocks_of_fp8(tmp_path: Path, name: str) -> None:
    """As DeepSeek V3 is published: routers stay in plain numbers without a word in the config."""
    save(BY_NAME[name], tmp_path)
    plain: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for tensor, weight in load_file(file_of(tmp_path)).items():
        if weight.dim() != 2 or tensor.endswith(
            ("embed_tokens.weight", "lm_head.weight", "gate.weight")
        ):
            plain[tensor] = stored[tensor] = weight
            continue
        high, wide = (-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
        scales = 0.5 + torch.rand(high, wide, generator=torch.Generator().manual_seed(1))
        each = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        each = each[: weight.shape[0], : weight.shape[1]]
        rounded = (weight / each).to(torch.float8_e4m3fn)
        stored |= {tensor: rounded, f"{tensor}_scale_inv": scales}
        plain[tensor] = rounded.float() * each
    rewrite(tmp_path, plain, None)
    want = says(tmp_path)
    quantization = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    rewrite(tmp_path, stored, {**quantization, "activation_scheme": "dynamic", "fmt": "e4m3"})
    assert error(says(tmp_path), want) < 1e-6
