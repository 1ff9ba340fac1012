"""llama.cpp's blocks of 256, packed by hand as its source documents them, say what was packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch
from tests.models.quantization.packing import q4_k, q6_k
from torch import Tensor

from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.formats.gguf import PLAIN, READABLE, read_gguf_files

if TYPE_CHECKING:
    from pathlib import Path

Kind = gguf.GGMLQuantizationType
NAME = "model.layers.0.mlp.up_proj.weight"


def drawn(low: int, high: int, *size: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, size, generator=torch.Generator().manual_seed(seed))


def read(file: Path, kind: Kind, blocks: list[bytes]) -> Tensor:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_head_count(1)
    content = np.frombuffer(b"".join(blocks), dtype=np.uint8).reshape(len(blocks), -1)
    writer.add_tensor("blk.0.ffn_up.weight", content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = read_gguf_files([file], [NAME], mapped=True)[NAME]
    return stored.decode(stored.data.read())


def test_q4_k_blocks_are_read_as_they_are_documented(tmp_path: Path) -> None:
    scales, mins = drawn(0, 64, 3, 8), drawn(0, 64, 3, 8, seed=1)
    steps = drawn(0, 16, 3, 8, 32, seed=2)
    blocks = [q4_k(0.5, 0.25, scales[i], mins[i], steps[i]) for i in range(3)]
    expected = 0.5 * scales[..., None] * steps - 0.25 * mins[..., None]
    assert torch.equal(read(tmp_path / "a.gguf", Kind.Q4_K, blocks), expected.view(3, 256))


def test_q6_k_blocks_are_read_as_they_are_documented(tmp_path: Path) -> None:
    scales, steps = drawn(-128, 128, 3, 16), drawn(-32, 32, 3, 16, 16, seed=1)
    blocks = [q6_k(0.125, scales[i], steps[i]) for i in range(3)]
    expected = 0.125 * scales[..., None] * steps
    assert torch.equal(read(tmp_path / "a.gguf", Kind.Q6_K, blocks), expected.view(3, 256).float())


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_any_block_is_read_as_the_public_package_reads_it(tmp_path: Path, kind: Kind) -> None:
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    content = random.integers(0, 256, (6, size), dtype=np.uint8)
    # Scales that are finite, wherever a layout has them.
    for place in (0, 2, size - 2):
        content[:, place : place + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    found = read(tmp_path / "a.gguf", kind, [row.tobytes() for row in content])
    assert found.shape == (6, numbers)
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(content, kind)))


ROUNDED = [kind for kind in READABLE if kind not in PLAIN]


@pytest.mark.parametrize("kind", ROUNDED, ids=lambda kind: kind.name)
def test_every_kind_is_read_as_the_public_package_reads_it(tmp_path: Path, kind: Kind) -> None:
    _, size = gguf.GGML_QUANT_SIZES[kind]
    content = np.random.default_rng(0).integers(0, 256, (24, size), dtype=np.uint8)
    with np.errstate(all="ignore"):  # some scales are infinite or no numbers
        found = read(tmp_path / "a.gguf", kind, [row.tobytes() for row in content])
        expected = torch.from_numpy(gguf.dequantize(content, kind))
    assert expected.isfinite().any()
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_a_kind_that_no_weight_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"is Q8_K: only F32, F16, BF16, Q4_0"):
        read(tmp_path / "a.gguf", Kind.Q8_K, [bytes(292)])
