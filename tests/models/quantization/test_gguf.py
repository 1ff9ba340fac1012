"""llama.cpp's blocks of 256, packed by hand as its source documents them, say what was packed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.models.parity import LINEARS
from tests.models.quantization.made import q4_k, q6_k
from tests.models.stepper import logits_of, prompts
from tests.models.test_llama_parity import assert_close
from tests.models.test_load_formats import Kind, finish, write_gguf
from tests.models.tiny import write_llama
from tests.support.models import open_model, take_tensors
from torch import Tensor

from antiphon.kernels.linear_grouped import GroupedCodes, codes_of
from antiphon.layers.attention import Attention
from antiphon.layers.linear import ColumnLinear, LinearPart
from antiphon.layers.methods import (
    CodesInGroups,
    GroupedCodeWeights,
    GroupedWeights,
    LinearMethod,
    LinearShape,
)
from antiphon.layers.quantization.gguf import LAYOUTS, GgufStorage
from antiphon.layers.weights import BuildContext, CheckpointQuantization, SingleRank
from antiphon.model_card import weight_headers
from antiphon.model_card.files import find_files
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.formats.gguf import PLAIN, READABLE, read_gguf_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from antiphon.layers.quantization.storage import GroupedWeight


NAME = "model.layers.0.mlp.up_proj.weight"


def drawn(low: int, high: int, *size: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, size, generator=torch.Generator().manual_seed(seed))


def read(file: Path, kind: Kind, blocks: list[bytes]) -> Tensor:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_head_count(1)
    content = np.frombuffer(b"".join(blocks), dtype=np.uint8).reshape(len(blocks), -1)
    writer.add_tensor("blk.0.ffn_up.weight", content, raw_dtype=kind)
    finish(writer)
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
        for name, tensor in take_tensors(llama).items()
    }
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
    if "packed" in LINEARS:
        place = find_files(llama / "model.gguf")
        model = open_model(place, dtype="float32", linear="packed", quantized="grouped")
        mixer = model.runner._model.own_decoder.layers[0]._mixer
        assert isinstance(mixer, Attention)
        assert isinstance(mixer._qkv._weights, GroupedWeights)
        assert_close(logits_of(model, ids, 31), theirs, LIMIT)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_codes_and_scales_are_those_of_the_public_package(kind: str) -> None:
    """Bit by bit, where the package's numbers are finite."""
    type_, layout = Kind[kind], LAYOUTS[kind]
    assert gguf.GGML_QUANT_SIZES[type_] == (layout.inputs, layout.block_bytes)
    assert layout.grouping.fits(layout.inputs)
    rows = np.random.default_rng(0).integers(0, 256, (24, 3 * layout.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(rows, type_))
    stored = {".weight": torch.from_numpy(rows)}
    found = GgufStorage(kind).dequantize(stored, 24, 3 * layout.inputs).dequantize()
    finite = expected.isfinite()
    assert finite.double().mean() > 0.9
    assert torch.equal(found[finite], expected[finite])
    each = weight_headers.GGUF_GROUPED_BYTES[type_.value]
    assert layout.grouping.multiplied_in(torch.bfloat16).panel_bytes(256) == each * 256 * 32
    assert gpu_bytes(kind) == weight_headers.GGUF_GPU_BYTES[type_.value] * 256 * 32
    wide = each + weight_headers.GGUF_WIDE_SCALES.get(type_.value, 0.0)
    assert layout.grouping.multiplied_in(torch.float32).panel_bytes(256) == wide * 256 * 32


def gpu_bytes(kind: str) -> int:
    """What 32 outputs of 256 inputs take on a GPU."""
    layout = LAYOUTS[kind]
    codes = codes_of(layout.grouping, 256)
    assert codes is not None
    shape, device = LinearShape(256, 32, bias=False), torch.device("meta")
    matrix = CodesInGroups(layout.grouping, codes).empty(shape, torch.bfloat16, device)
    parts = (matrix.codes, matrix.scales, matrix.minimums)
    return sum(part.nbytes for part in parts if part is not None)


def test_codes_of_4_bits_stay_so_in_groups_of_16_and_of_whole_units() -> None:
    """Two codes of a byte are of inputs 16 apart: they share a scale, or each has its own."""
    grouping = replace(LAYOUTS["Q4_0"].grouping, group=16)
    assert codes_of(grouping, 256) == GroupedCodes(4, -8)
    assert codes_of(replace(grouping, group=48), 256) == GroupedCodes(8)
    assert codes_of(replace(grouping, group=32), 256) == GroupedCodes(4, -8)
    assert codes_of(replace(grouping, group=8), 256) is codes_of(grouping, 80) is None


def loaded_as_one(
    kinds: tuple[str, ...], *, interpreted: bool = False
) -> tuple[ColumnLinear, Tensor]:
    """A linear of several kinds with weights that are drawn, which are (O, I), too."""
    storage = {f"l.{place}": GgufStorage(kind) for place, kind in enumerate(kinds)}
    quantization = CheckpointQuantization(LinearMethod.GROUPED, storage.__getitem__)
    device, dtype = torch.device("cpu"), torch.bfloat16
    build = BuildContext(SingleRank(), dtype, device, quantization, interpreted=interpreted)
    method = LinearMethod.PLAIN if interpreted else LinearMethod.PACKED
    parts = tuple(LinearPart(name, 64, shards=1) for name in storage)
    linear = ColumnLinear("l", 256, parts, bias=False, build=build, method=method)
    whole: list[Tensor] = []
    for source, (name, one) in zip(linear.sources(), storage.items(), strict=True):
        assert source.name == f"{name}.weight"
        blocks = drawn(0, 256, *source.shape, seed=len(whole)).to(torch.uint8)
        layout = LAYOUTS[one.kind]
        for at in HALVES[one.kind]:  # scales of a size that weights have
            blocks[:, at :: layout.block_bytes] = 0
            blocks[:, at + 1 :: layout.block_bytes] = 0x14
        assert source.load is not None
        source.load(blocks)
        whole.append(in_two_bytes(one.dequantize({".weight": blocks}, 64, 256)).dequantize())
    return linear, torch.cat(whole)


DIFFERENT = [("Q4_K", "Q4_K", "Q6_K"), ("Q5_0", "Q8_0", "Q8_0")]
"""As in files of llama.cpp, whose values have more bits than queries and keys."""


@pytest.mark.skipif("packed" not in LINEARS, reason="the kernels are not built")
@pytest.mark.parametrize("kinds", DIFFERENT, ids=str)
def test_linears_of_different_kinds_run_as_one(kinds: tuple[str, ...]) -> None:
    linear, whole = loaded_as_one(kinds)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.double() @ whole.double().T
    assert linear.packed is not None
    found = linear.packed.multiply_wide(x)
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("kinds", [*DIFFERENT, ("IQ4_NL",), ("Q4_0",)], ids=str)
def test_a_gpu_keeps_them_in_codes_that_are_the_same_numbers(kinds: tuple[str, ...]) -> None:
    linear, whole = loaded_as_one(kinds, interpreted=True)
    weights = linear._weights
    assert isinstance(weights, GroupedCodeWeights)
    assert torch.equal(weights.matrix.dequantize(), whole)
    assert weights.matrix.codes.dtype is (torch.uint8 if kinds == ("Q4_0",) else torch.int8)


def in_two_bytes(weight: GroupedWeight) -> GroupedWeight:
    """With scales and minimums as they meet activations in bfloat16."""
    parts = {name: one.half().float() for name, one in weight.tensors() if name != "codes"}
    return replace(weight, **parts)


HALVES = {"Q4_K": (0, 2), "Q6_K": (208,), **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (0,))}
"""Bytes of a block where float16 numbers begin."""
