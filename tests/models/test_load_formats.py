"""The same weights in every format give the same model; what cannot be read is refused by name."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
from functools import partial
from typing import TYPE_CHECKING

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tests.models.rank import LoneRank
from tests.models.stepper import stepper
from tests.models.tiny import QWEN2, write_llama, write_qwen2
from tests.support.models import change_config, load, open_model
from torch import Tensor

from antiphon.config.model import LoadFormat
from antiphon.layers.weights import WeightSource
from antiphon.model_card.files import ModelFiles, find_files
from antiphon.model_worker.model import weights as loading
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.formats.files import TensorData, copied_data
from antiphon.model_worker.model.weights import Checkpoint, LoadProgress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np

Kind = gguf.GGMLQuantizationType


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder of safetensors, as the public package reads them."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def weights(place: Path | ModelFiles) -> dict[str, Tensor]:
    """What a decoder holds after loading, source by source."""
    model = load(place, dtype="float32")
    kept: dict[str, Tensor] = {}
    decoder = model.own_decoder
    for source in decoder.sources():
        kept[source.name] = torch.full(source.shape, float("nan"))
    checkpoint = Checkpoint.open(place, list(decoder.sources()))
    for name, into in kept.items():
        stored = checkpoint.tensors[name]
        into.copy_(stored.decode(stored.data.read()))
        stored.data.release()
    return kept


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].float()), name


@pytest.fixture
def bare(llama: Path, tmp_path: Path) -> Path:
    """The model's config without its weights."""
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(llama / "config.json", folder)
    return folder


def cut_short(file: Path, kept: float) -> None:
    """Keep so many bytes of a file, or this part of them."""
    content = file.read_bytes()
    file.write_bytes(content[: int(kept if kept >= 1 else kept * len(content))])


# torch's own files


@pytest.fixture
def torch_folder(llama: Path, bare: Path) -> Path:
    """Two shards under an index, and what a trainer left."""
    tensors = tensors_of(llama)
    shards = {name: f"pytorch_model-{1 + i % 2}.bin" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        torch.save({n: t for n, t in tensors.items() if shards[n] == shard}, bare / shard)
    index = {"metadata": {}, "weight_map": shards}
    (bare / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.save({"lr": 0.1}, bare / "training_args.bin")
    return bare


def test_files_of_torch_give_the_same_weights(torch_folder: Path, llama: Path) -> None:
    assert find_files(torch_folder).format is LoadFormat.PT
    assert_same(weights(torch_folder), tensors_of(llama))
    assert_same(weights(find_files(torch_folder, mapped=False)), tensors_of(llama))


def test_a_file_of_torch_without_an_index_is_found_too(llama: Path, bare: Path) -> None:
    torch.save(tensors_of(llama), bare / "model.pt")
    assert_same(weights(bare), tensors_of(llama))


def test_a_file_from_before_torch_1_6_is_read_without_mapping(llama: Path, bare: Path) -> None:
    file = bare / "pytorch_model.bin"
    torch.save(tensors_of(llama), file, _use_new_zipfile_serialization=False)
    assert_same(weights(bare), tensors_of(llama))


class Trap:
    """Code in a pickle; it would leave a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.makedirs, (str(self.mark),)


def test_code_in_a_file_of_torch_is_named_and_not_run(bare: Path, tmp_path: Path) -> None:
    mark, match = tmp_path / "ran", r"pytorch_model\.bin: refused: it would run os.makedirs$"
    torch.save({"weight": Trap(mark)}, bare / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=match):
        load(bare)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "contains a list"),
        ({"state_dict": {"a": torch.ones(1)}}, "state_dict is a dict"),
        ({"a": torch.ones(1, dtype=torch.float64)}, "a is float64: only float32, bfloat16"),
        ({}, "files hold no tensors"),
    ],
    ids=["list", "nested", "float64", "empty"],
)
def test_a_file_of_torch_that_holds_something_else_is_refused(
    bare: Path, content: object, message: str
) -> None:
    torch.save(content, bare / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=message):
        load(bare)


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.99], ids=lambda kept: f"first {kept}")
def test_a_file_of_torch_that_was_cut_short_is_refused(torch_folder: Path, kept: float) -> None:
    cut_short(torch_folder / "pytorch_model-1.bin", kept)
    with pytest.raises(ModelLoadError, match=r"pytorch_model-1\.bin: (cut short|refused)"):
        load(torch_folder)


def test_a_missing_file_of_torch_is_named(torch_folder: Path) -> None:
    (torch_folder / "pytorch_model-2.bin").unlink()
    with pytest.raises(ModelLoadError, match=r"pytorch_model-2\.bin: No such file"):
        load(torch_folder)


# GGUF


def rotated_as_llama_cpp_does(tensor: Tensor, heads: int) -> Tensor:
    """What its converter does to queries and keys of Llama: halves become neighbours."""
    halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def write_gguf(
    folder: Path,
    file: Path,
    *,
    architecture: str = "llama",
    kind: Kind = Kind.F32,
    quantize: Callable[[Tensor], np.ndarray] | None = None,
) -> None:
    """Write the safetensors of a folder as llama.cpp's converter would.

    `quantize` makes the blocks of a `kind` that the package only reads.
    """
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_token_list(["a", "b", "ä"])  # lists are passed over
    writer.add_array("some.numbers", [1, 2, 3])
    if architecture == "llama":
        writer.add_tensor("rope_freqs.weight", torch.ones(8).numpy())
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in tensors_of(folder).items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        if architecture == "llama" and (".q_proj" in name or ".k_proj" in name):
            data = rotated_as_llama_cpp_does(tensor, heads if ".q_proj" in name else kv_heads)
        else:
            data = tensor
        as_is = Kind.F32 if tensor.ndim == 1 else kind
        blocks = None if quantize is None or tensor.ndim == 1 else quantize(data.float())
        if blocks is None:
            blocks = gguf.quantize(data.float().numpy(), as_is)
        writer.add_tensor(own, blocks, raw_dtype=as_is)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_of_llama_gives_the_same_weights(llama: Path, bare: Path) -> None:
    write_gguf(llama, bare / "model.gguf")
    assert find_files(bare).format is LoadFormat.GGUF
    for place in (bare, bare / "model.gguf", find_files(bare, mapped=False)):
        assert_same(weights(place), tensors_of(llama))


def test_a_gguf_file_may_be_described_by_another_folder(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf")
    files = find_files(tmp_path / "model.gguf", described_in=llama)
    assert_same(weights(files), tensors_of(llama))


ROUNDED = (Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)


@pytest.mark.parametrize("kind", ROUNDED, ids=lambda kind: kind.name)
def test_rounded_numbers_of_gguf_are_those_that_its_own_package_reads(
    tmp_path: Path, kind: Kind
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96}
    llama = write_llama(tmp_path / "llama", shape)
    file = tmp_path / "llama" / "model.gguf"
    write_gguf(llama, file, kind=kind)
    found = weights(find_files(file))
    for name, tensor in tensors_of(llama).items():
        as_is = Kind.F32 if tensor.ndim == 1 else kind
        rounded = gguf.dequantize(gguf.quantize(tensor.float().numpy(), as_is), as_is)
        assert torch.equal(found[name], torch.from_numpy(rounded)), name


def test_a_gguf_file_of_qwen2_has_biases_and_its_rows_in_order(tmp_path: Path) -> None:
    qwen = write_qwen2(tmp_path / "qwen", QWEN2)
    write_gguf(qwen, tmp_path / "qwen" / "model.gguf", architecture="qwen2")
    found = weights(find_files(qwen / "model.gguf"))
    assert any(name.endswith("q_proj.bias") for name in found)
    assert_same(found, tensors_of(qwen))


def test_a_tied_head_that_gguf_repeats_is_no_surprise(tmp_path: Path) -> None:
    llama = write_llama(tmp_path / "llama")
    write_gguf(llama, llama / "model.gguf")
    change_config(llama, tie_word_embeddings=True)
    assert "lm_head.weight" not in weights(llama / "model.gguf")


def test_parts_of_one_gguf_model_are_found_by_any_of_them(llama: Path, bare: Path) -> None:
    parts = [bare / f"m-{number:05}-of-00002.gguf" for number in (1, 2)]
    for file in (*parts, bare / "other.gguf"):
        write_gguf(llama, file)
    files = find_files(parts[1])
    assert list(files.weights) == parts
    assert_same(weights(files), tensors_of(llama))


def test_an_unknown_gguf_architecture_is_refused(bare: Path) -> None:
    finish(gguf.GGUFWriter(bare / "model.gguf", "falcon"))
    with pytest.raises(ModelLoadError, match=r"'falcon' are not read: there are llama, qwen2"):
        load(bare)


@pytest.mark.parametrize("kept", [0, 20, 0.002, 0.5, 0.999], ids=lambda kept: f"first {kept}")
def test_a_gguf_file_that_was_cut_short_is_refused(llama: Path, bare: Path, kept: float) -> None:
    write_gguf(llama, bare / "model.gguf")
    cut_short(bare / "model.gguf", kept)
    with pytest.raises(ModelLoadError, match=r"model\.gguf: (cut short|not a GGUF file)"):
        load(bare)


def greedy(place: Path | ModelFiles) -> list[int]:
    model = open_model(place, pages=32, dtype="float32")
    batch = stepper(model, [[5, 7, 11, 13]])
    batch.prefill()
    batch.decode(20)
    return batch.lines[0].ids


def test_a_gguf_file_gives_the_text_of_its_safetensors(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf")
    assert greedy(find_files(tmp_path / "model.gguf", described_in=llama)) == greedy(llama)


# Dummy


def test_dummy_weights_are_the_same_each_time_and_on_every_rank(llama: Path) -> None:
    files = find_files(llama, LoadFormat.DUMMY)
    first, second = weights(files), weights(files)
    assert_same(first, second)
    matrix = first["model.layers.0.mlp.up_proj.weight"]
    assert matrix.std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(matrix, first["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(first["model.norm.weight"], torch.ones(48))


def test_dummy_weights_need_no_files(bare: Path) -> None:
    assert load(find_files(bare, LoadFormat.DUMMY)).spec.layers[3:]


# How they are read


def test_copied_files_give_the_same_weights_as_mapped_ones(llama: Path) -> None:
    assert_same(weights(find_files(llama, mapped=False)), weights(llama))


def test_mapped_parts_come_back_after_they_were_let_go(llama: Path) -> None:
    checkpoint = Checkpoint.open(llama)
    tensor = checkpoint.tensors["model.embed_tokens.weight"]
    first = tensor.data.read()
    assert tensor.data.read().data_ptr() == first.data_ptr(), "mapped"
    before = tensor.decode(first).clone()
    tensor.data.release()
    assert torch.equal(tensor.decode(tensor.data.read()), before)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_no_rows_of_others(
    llama: Path, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, loading.__name__)
    loaded = {
        mapped: load(find_files(llama, mapped=mapped), tp=LoneRank(rank, 2), dtype="float32")
        for mapped in (True, False)
    }
    load(llama, dtype="float32")
    read = [record.__dict__["bytes"] for record in caplog.records if "bytes" in record.__dict__]
    assert read[0] == read[1] < 0.8 * read[2]
    whole = weights(llama)["model.embed_tokens.weight"]
    share = -(-len(whole) // 2)
    own = whole[rank * share : (rank + 1) * share].float()
    for model in loaded.values():
        assert model.own_decoder.embedding is not None
        found = model.own_decoder.embedding._weights.rows(torch.arange(len(own)))
        assert torch.equal(found, own)
    # What is left out of a copied file is undefined.
    monkeypatch.setattr(torch, "empty", torch.zeros)
    stored = Checkpoint.open(find_files(llama, mapped=False)).tensors["model.embed_tokens.weight"]
    assert stored.data.cut is not None
    size, row_bytes = stored.data.size_bytes, stored.data.size_bytes // len(whole)
    part = stored.data.cut(share * row_bytes, size)
    assert part.size_bytes == size - share * row_bytes
    assert not stored.decode(part.read())[:share].any()


def test_a_file_that_shrinks_while_it_is_copied_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345678")
    part = copied_data(file, 4, 8)
    with pytest.raises(ModelLoadError, match=r"cut short while it was read, at 8"):
        part.read()


def test_a_failure_in_one_tensor_ends_the_loading(llama: Path) -> None:
    checkpoint = Checkpoint.open(llama)
    loaded: list[str] = []

    def load_or_fail(name: str) -> None:
        if name == "model.norm.weight":
            raise ModelLoadError(name)
        loaded.append(name)

    sources = [
        WeightSource(name, tensor.shape, lambda _, name=name: load_or_fail(name))
        for name, tensor in checkpoint.tensors.items()
    ]
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight"):
        checkpoint.load(sources)
    assert len(loaded) < len(sources)


def test_a_tensor_of_several_takers_is_read_once(llama: Path) -> None:
    checkpoint = Checkpoint.open(llama)
    name = "model.norm.weight"
    taken: list[Tensor] = []
    twice = [WeightSource(name, checkpoint.tensors[name].shape, taken.append)] * 2
    checkpoint.load(twice)
    assert taken[0] is taken[1]


def test_what_is_read_ahead_is_bounded_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "AHEAD_BYTES", 100)
    monkeypatch.setattr(loading, "ASKED_BYTES", 200)
    held: set[int] = set()
    asked: list[int] = []
    most = asked_most = 0

    def read(number: int) -> Tensor:
        held.add(number)
        return torch.tensor(number)

    tensors = [
        TensorData(40, partial(read, n), partial(asked.append, n), partial(held.discard, n))
        for n in range(20)
    ]
    for number, content in enumerate(loading.prefetch_tensors(tensors)):
        assert content.item() == number
        most = max(most, len(held))
        asked_most = max(asked_most, len(asked) - number)
        tensors[number].release()
    assert most <= 3
    assert not held
    # What prefetches may be late, and is not waited for.
    assert asked == list(range(len(asked))) != []
    assert asked_most <= 6


@pytest.mark.parametrize("mapped", [True, False])
def test_what_the_disk_was_asked_for_is_read_all_the_same(llama: Path, mapped: bool) -> None:
    tensors = Checkpoint.open(find_files(llama, mapped=mapped)).tensors
    for tensor in tensors.values():
        before = tensor.data.read().clone()
        tensor.data.prefetch()
        assert torch.equal(tensor.data.read(), before)


def test_loading_logs_its_progress_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    progress = LoadProgress(1000, clock=lambda: now[0], stream=io.StringIO())
    with caplog.at_level(logging.INFO):
        for _ in range(10):
            now[0] += 0.5
            progress.add(100)
        progress.end()
    lines = [record for record in caplog.records if record.message == "loading weights"]
    shown = [(vars(line)["done_bytes"], vars(line)["seconds_left"]) for line in lines]
    assert shown == [(200, 4.0), (400, 3.0), (600, 2.0), (800, 1.0), (1000, 0.0)]
    assert caplog.records[-1].message == "weights loaded"
    last = vars(caplog.records[-1])
    assert (last["bytes"], last["seconds"]) == (1000, 5.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_it_is_a_bar_that_goes_away(caplog: pytest.LogCaptureFixture) -> None:
    now, terminal = [0.0], Terminal()
    progress = LoadProgress(4_000_000_000, clock=lambda: now[0], stream=terminal)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            now[0] += 2.0
            progress.add(1_000_000_000)
        progress.end()
    pictures = terminal.getvalue().split("\r\033[K")[1:]
    assert pictures == [
        "loading weights [#######.......................] 1.00 of 4.00 GB, 6 s left",
        "loading weights [###############...............] 2.00 of 4.00 GB, 4 s left",
        "loading weights [######################........] 3.00 of 4.00 GB, 2 s left",
        "loading weights [##############################] 4.00 of 4.00 GB, 0 s left",
        "",
    ]
    assert caplog.messages == ["weights loaded"]
