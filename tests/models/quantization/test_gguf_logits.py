"""A GGUF file says what transformers says with the numbers that its blocks stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.models.parity import LINEARS
from tests.models.quantization.packing import q4_k, q6_k
from tests.models.test_llama_parity import assert_close, logits_of, prompts
from tests.models.test_load_formats import Kind, tensors_of, write_gguf
from tests.models.tiny import write_llama
from tests.support.models import open_model

from antiphon.model_card.files import find_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

SHAPE: Mapping[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Whole blocks of 256."""
LIMIT = 2e-5
"""As of plain numbers: what is multiplied is what the blocks say."""


def by_package(kind: Kind) -> Callable[[Tensor], np.ndarray]:
    return lambda weight: gguf.quantize(weight.numpy(), kind)


def in_q4_k(weight: Tensor) -> np.ndarray:
    """Runs of 32 between their least and their greatest; the package has no function for it."""
    runs = weight.view(-1, 8, 32)
    least, most = runs.amin(-1).clamp(max=0), runs.amax(-1)
    steep, deep = (most - least) / 15, -least
    scale, floor = steep.amax(1) / 63, deep.amax(1) / 63
    scales = (steep / scale[:, None]).ceil().clamp(1, 63)
    mins = (deep / floor[:, None]).round().clamp(0, 63)
    near = runs + (floor[:, None] * mins)[..., None]
    steps = (near / (scale[:, None] * scales)[..., None]).round().clamp(0, 15).int()
    parts = zip(scale, floor, scales.int(), mins.int(), steps, strict=True)
    return _rows([q4_k(float(s), float(f), *rest) for s, f, *rest in parts], len(weight))


def in_q6_k(weight: Tensor) -> np.ndarray:
    """Runs of 16 about zero; the package has no function for it."""
    runs = weight.view(-1, 16, 16)
    steep = runs.abs().amax(-1) / 31
    scale = steep.amax(1) / 127
    scales = (steep / scale[:, None]).ceil().clamp(1, 127)
    steps = (runs / (scale[:, None] * scales)[..., None]).round().clamp(-32, 31).int()
    parts = zip(scale, scales.int(), steps, strict=True)
    return _rows([q6_k(float(s), *rest) for s, *rest in parts], len(weight))


def _rows(blocks: list[bytes], outputs: int) -> np.ndarray:
    return np.frombuffer(b"".join(blocks), np.uint8).reshape(outputs, -1)


MADE: Mapping[Kind, Callable[[Tensor], np.ndarray]] = {
    Kind.Q8_0: by_package(Kind.Q8_0),
    Kind.Q4_0: by_package(Kind.Q4_0),
    Kind.Q4_1: by_package(Kind.Q4_1),
    Kind.Q5_0: by_package(Kind.Q5_0),
    Kind.Q5_1: by_package(Kind.Q5_1),
    Kind.Q4_K: in_q4_k,
    Kind.Q6_K: in_q6_k,
}


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.name)
def test_logits_are_those_of_the_numbers_that_the_blocks_stand_for(
    tmp_path: Path, reference, kind: Kind
) -> None:
    llama = write_llama(tmp_path / "llama", SHAPE)
    # Small enough that no softmax saturates, where roundings of float32 would grow.
    tensors = {
        name: tensor / 4 if name.endswith("_proj.weight") else tensor
        for name, tensor in tensors_of(llama).items()
    }
    for file in (*llama.glob("*.safetensors*"),):
        file.unlink()
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    write_gguf(llama, llama / "model.gguf", kind=kind, quantize=MADE[kind])
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_text((llama / "config.json").read_text())
    said: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            said[name] = tensor
            continue
        said[name] = torch.from_numpy(gguf.dequantize(MADE[kind](tensor), kind).copy())
        off = (said[name] - tensor).abs().max() / tensor.abs().max()
        assert 0 < off < 0.15, f"{name} is another weight"
    save_file(said, whole / "model.safetensors", metadata={"format": "pt"})
    ids = prompts()[-1]
    theirs = reference(whole).logits(ids)
    plain = reference(llama).logits(ids)
    assert (theirs - plain).abs().max() / theirs.std() > 100 * LIMIT, "rounding does not show"
    for linear in LINEARS:
        model = open_model(find_files(llama / "model.gguf"), dtype="float32", linear=linear)
        assert_close(logits_of(model, ids, 31), theirs, LIMIT)
