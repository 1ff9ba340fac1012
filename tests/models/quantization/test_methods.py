"""A checkpoint in fewer bits says what its weights say, however it is cut and kept."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from tests.models.quantization.rows import BY_NAME, ROWS, SKIPPED, Change, Row, write
from tests.models.rank import LoneRank
from tests.models.stepper import logits_of, prompts
from tests.models.test_llama_parity import assert_close
from tests.support.models import change_config, change_tensors, load, open_model
from torch import Tensor

from antiphon.config.load import load as settings_of
from antiphon.config.model import LoadFormat
from antiphon.config.quantization import (
    Fp8,
    OnlineFp8,
    QuantizationMethod,
    QuantizationScheme,
    choose_quantization,
)
from antiphon.kernels.cpu import extension
from antiphon.layers.embedding import VocabParallelEmbedding
from antiphon.layers.linear import CheckpointLayout, RowLinear, quantized_sources
from antiphon.layers.methods import (
    ON_DEVICE,
    Fp8Weights,
    GroupedCodeWeights,
    LinearMethod,
    PlainWeights,
    TiledWeights,
)
from antiphon.layers.quantization import storage as parts
from antiphon.layers.weights import BuildContext, CheckpointQuantization, SingleRank
from antiphon.model_card.card import read_card
from antiphon.model_card.files import find_files
from antiphon.model_card.quantization_config import read_quantization
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.load import storage_of
from antiphon.model_worker.model.weights import Checkpoint
from antiphon.model_worker.startup.loading import load_resolved
from antiphon.resolve.device import HostDevice
from antiphon.resolve.resolved_config import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from antiphon.kernels.cpu.linear import Grouping
    from antiphon.model_worker.runner.opening import OpenModel

LACKING = extension.unavailable_reason()
ALL = pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
Folders = dict[str, tuple["Path", "Path"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Of each row: a checkpoint of it, and the same in plain numbers."""
    return {}


@pytest.fixture
def written(row: Row, folders: Folders, tmp_path_factory: pytest.TempPathFactory):
    if row.name not in folders:
        folders[row.name] = write(tmp_path_factory.mktemp("row"), row)
    return folders[row.name]


def quantization(folder: Path, row: Row):
    said = None if row.said is None else QuantizationMethod(row.said)
    found = choose_quantization(read_card(folder).quantization, said)
    assert found is not None
    return found


def linears(folder: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every linear of a plain checkpoint's layers."""
    tensors = Checkpoint.open(folder).tensors
    return {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in tensors.items()
        if name.endswith("_proj.weight")
    }


@dataclass(frozen=True)
class Wrong:
    """A reader that makes something else of some tensors."""

    right: parts.StorageLayout
    changes: Mapping[str, Change]

    def fields(self, outputs: int, inputs: int) -> parts.WeightFields:
        return self.right.fields(outputs, inputs)

    def dequantize(
        self, stored: Mapping[str, Tensor], outputs: int, inputs: int
    ) -> parts.LoadedWeight:
        same = dict(stored)
        changed = {suffix: change(same[suffix]) for suffix, change in self.changes.items()}
        return self.right.dequantize(same | changed, outputs, inputs)

    def grouping(self, inputs: int) -> Grouping | None:
        return self.right.grouping(inputs)


def read(
    written: tuple[Path, Path],
    row: Row,
    changes: Mapping[str, Change] | None = None,
    part: parts.WeightSlice | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every stored weight as the reader has it, and as it should be."""
    stored, plain = written
    said = quantization(stored, row)
    checkpoint, whole = Checkpoint.open(stored), Checkpoint.open(plain)
    checkpoint.rename_endings(said.spelled)
    found: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name, (outputs, inputs) in linears(plain).items():
        scheme = said.scheme(name)
        if scheme is None:
            assert name == SKIPPED
            continue
        storage: parts.StorageLayout = storage_of(scheme)
        if changes:
            storage = Wrong(storage, changes)
        cut = part or parts.WeightSlice(slice(0, outputs), slice(0, inputs))
        cut = parts.WeightSlice(_within(cut.outputs, outputs), _within(cut.inputs, inputs))
        into = torch.full((_length(cut.outputs), _length(cut.inputs)), float("nan"))

        def take(row: int, piece: parts.LoadedWeight, into: Tensor = into) -> None:
            numbers = parts.dequantized(piece)
            into[row : row + len(numbers)] = numbers

        sources = list(quantized_sources(name, storage, (outputs, inputs), cut, take))
        checkpoint.load(sources)
        found[name] = into
        one = whole.tensors[f"{name}.weight"]
        expected[name] = one.decode(one.data.read())[cut.outputs, cut.inputs]
    return found, expected


def _within(part: slice, total: int) -> slice:
    return slice(min(part.start, total - 1), min(part.stop, total))


def _length(part: slice) -> int:
    return part.stop - part.start


def assert_weights(
    found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 0.0
) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        error = (weight - expected[name]).abs().max() / expected[name].abs().max()
        assert error <= limit, f"{name}: off by {error:.1e} of the greatest weight"


@ALL
def test_weights_are_those_that_were_stored(row: Row, written) -> None:
    found, expected = read(written, row)
    assert len(found) == 7 * 2 - (1 if row.skipped else 0)
    assert_weights(found, expected)


@ALL
def test_a_reader_that_is_wrong_is_found_out(row: Row, written) -> None:
    assert row.mutants
    for name, changes in row.mutants.items():
        found, expected = read(written, row, changes)
        print("mutant", name)
        with pytest.raises(AssertionError, match="of the greatest weight"):
            assert_weights(found, expected, 1e-3)


CUTS = {
    "outputs": parts.WeightSlice(slice(96, 192), slice(0, 10**6)),
    "inputs": parts.WeightSlice(slice(0, 10**6), slice(64, 128)),
    "through words and groups": parts.WeightSlice(slice(37, 101), slice(3, 129)),
}


@ALL
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_a_part_of_a_weight_is_that_part_wherever_it_is_cut(
    row: Row, written, cut: parts.WeightSlice
) -> None:
    assert_weights(*read(written, row, part=cut))


def row_scheme(row: Row) -> QuantizationScheme:
    said = None if row.said is None else QuantizationMethod(row.said)
    config = json.dumps({"quantization_config": row.config}).encode()
    found = choose_quantization(read_quantization(config), said)
    assert found is not None
    return found.rules[0].scheme


MXFP4 = row_scheme(BY_NAME["mxfp4"])


def opened(folder: Path, row: Row, linear: str, quantized: str) -> OpenModel:
    return open_model(
        folder, dtype="float32", linear=linear, quantization=row.said, quantized=quantized
    )


@ALL
def test_logits_are_those_of_transformers_with_the_same_weights(
    row: Row, written, reference
) -> None:
    """Whether torch multiplies, or the CPU's own kernels with numbers or with bytes."""
    stored, plain = written
    ids = prompts()[-1]
    theirs = reference(plain).logits(ids)
    ways = ["plain"] if LACKING else ["plain", "packed"]
    if row.kept != "packed" and not LACKING:
        ways.append("int8" if row.kept.startswith("int8") else row.kept)
    for way in ways:
        plain_ones = way if way in ("plain", "packed") else "packed"
        ours = logits_of(opened(stored, row, plain_ones, way), ids, 31)
        assert_close(ours, theirs, row.limit)


IN_BYTES = [row for row in ROWS if row.rounded]


def test_the_plan_rounds_activations_of_these_rows_alone() -> None:
    assert [row for row in ROWS if row.kept == "int8_dynamic"] == IN_BYTES


@pytest.mark.parametrize("row", IN_BYTES, ids=[row.name for row in IN_BYTES])
@pytest.mark.skipif(bool(LACKING), reason=str(LACKING))
def test_activations_in_bytes_stay_near(row: Row, written, reference) -> None:
    stored, plain = written
    ids = prompts()[-1]
    theirs = reference(plain).logits(ids)
    ours = logits_of(opened(stored, row, "packed", "int8_dynamic"), ids, 31)
    assert 0 < float((ours - theirs).std() / theirs.std()) < row.rounded


IN_FP8 = [row for row in ROWS if isinstance(row_scheme(row), Fp8 | OnlineFp8)]


@pytest.mark.parametrize("row", IN_FP8, ids=[row.name for row in IN_FP8])
def test_weights_that_stay_in_fp8_have_rounded_activations(row: Row, written, reference) -> None:
    """As on a GPU: here torch multiplies."""
    stored, plain = written
    ids = prompts()[-1]
    theirs = reference(plain).logits(ids)
    ours = logits_of(opened(stored, row, "plain", "fp8"), ids, 31)
    assert 0 < float((ours - theirs).std() / theirs.std()) < 0.1


def weight_of(linear: Any) -> Tensor:
    """What a linear multiplies by, (O, I)."""
    weights = linear._weights
    if isinstance(weights, GroupedCodeWeights):
        return weights.matrix.dequantize()
    if not isinstance(weights, Fp8Weights):
        return weights.table
    matrix = weights.matrix
    return parts.Fp8Weight(matrix.codes, matrix.scales.T, matrix.group).dequantize()


OPS = {
    "fp8": "linear.fp8",
    "int8": "linear.grouped",
    "int8_dynamic": "linear.int8",
    "grouped": "linear.grouped",
}
"""What multiplies weights that are kept so on a GPU."""


def kept_on(
    folder: Path, row: Row | None, rank: int, ranks: int, quantized: str = "plain"
) -> list[Tensor]:
    """All weights of linears on one rank, in the order of the layers."""
    quantization = None if row is None else row.said
    files, tp = find_files(folder, mapped=False), LoneRank(rank, ranks)
    chosen: dict[str, Any] = {"quantization": quantization, "quantized": quantized}
    if quantized in ON_DEVICE:
        chosen["device"] = "interpreter"
    model = load(files, dtype="float32", tp=tp, **chosen)
    called = model.decoder.operations & set(OPS.values())
    assert called == ({OPS[quantized]} if quantized in OPS else set())
    weights: list[Tensor] = []
    for layer in model.own_decoder.layers:
        for block in vars(layer).values():
            if not hasattr(block, "__dict__"):
                continue
            linears = [one for one in vars(block).values() if hasattr(one, "_weights")]
            weights += map(weight_of, linears)
    assert len(weights) == 4 * 2
    return weights


@ALL
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_each_rank_has_its_part_of_every_weight(
    row: Row, written, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups, words and blocks are cut through here, along both dimensions.

    What a rank does not read of a file is not what the file has.
    """
    stored, plain = written
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(0x5A) if made.dtype is torch.uint8 else made

    monkeypatch.setattr(torch, "empty", filled)
    for rank in range(ranks):
        expected = kept_on(plain, None, rank, ranks)
        for quantized in ("plain", "fp8") if row in IN_FP8 else ("plain",):
            found = kept_on(stored, row, rank, ranks, quantized)
            assert all(map(torch.equal, found, expected))
        if row.kept in ON_DEVICE:  # zero points become minimums, which are rounded once more
            found = kept_on(stored, row, rank, ranks, row.kept)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


DEVICE = HostDevice(kind="cpu", cores=2, memory_bytes=1 << 30)


@ALL
def test_the_plan_has_the_format_in_memory_and_counts_it(row: Row, written) -> None:
    stored, plain = written
    environ = {} if row.said is None else {"ANTIPHON_MODEL__QUANTIZATION": row.said}
    environ |= {"ANTIPHON_MODEL__DTYPE": "bfloat16"}
    card = read_card(stored)
    plan = resolve(settings_of(environ=environ).settings, card, DEVICE)
    assert plan.quantized.value == row.kept, plan.quantized.reason
    in_linears = sum(outputs * inputs for outputs, inputs in linears(plain).values())
    skipped = math.prod(linears(plain)[SKIPPED]) if row.skipped else 0
    count = read_card(plain).weights.count
    in_fewer = in_linears - skipped
    if row.config is not None:
        assert card.weights.quantized == in_fewer
    each = {"packed": 2.0, "grouped": row.grouped_bytes}.get(row.kept, 1.0)
    taken = 2 * (count - in_fewer) + each * in_fewer
    # Norms, biases and, where config.json says nothing, scales count as weights do.
    assert abs(plan.weight_bytes.value / taken - 1) <= 0.01


@ALL
def test_the_plan_is_what_is_loaded(row: Row, written) -> None:
    environ = {"ANTIPHON_MODEL__DTYPE": "bfloat16", "ANTIPHON_MODEL__THREADS": "1"}
    environ |= {} if row.said is None else {"ANTIPHON_MODEL__QUANTIZATION": row.said}
    files = find_files(written[0])
    device = msgspec.structs.replace(DEVICE, lacking=LACKING)
    plan = resolve(settings_of(environ=environ).settings, read_card(files), device)
    model = load_resolved(files, plan)
    assert bool(logits_of(model, prompts()[3], 16).isfinite().all())


def everywhere(
    storage: parts.StorageLayout, method: LinearMethod = LinearMethod.PLAIN
) -> BuildContext:
    """Every linear is stored so; on the interpreter."""
    quantization = CheckpointQuantization(method, lambda _: storage)
    device = torch.device("cpu")
    return BuildContext(SingleRank(), torch.float32, device, quantization, interpreted=True)


def plain_linear(
    inputs: int, outputs: int, build: BuildContext, stored: CheckpointLayout
) -> RowLinear:
    method = LinearMethod.PLAIN
    return RowLinear("a", inputs, outputs, bias=False, build=build, method=method, stored=stored)


FUSED = (
    CheckpointLayout(run=96, first=32, runs=2),
    CheckpointLayout(run=64, runs=3, interleaved_size=32, head_size=64),
)


@ALL
@pytest.mark.parametrize("stored", FUSED, ids=["a part of each run", "rotated by neighbours"])
def test_a_linear_that_is_a_part_of_a_stored_tensor_is_taken_from_it(
    row: Row, stored: CheckpointLayout
) -> None:
    outputs = 64 if stored.first else 192
    weight = torch.randn(192, 256, generator=torch.Generator().manual_seed(1))
    made = row.make(weight)
    suffixes = {".weight_scale": ".weight_scale_inv"}
    kept = row.kept.removesuffix("_dynamic")
    ways = [LinearMethod.PLAIN, LinearMethod.FP8, *(one for one in ON_DEVICE if one == kept)]
    for method in ways:
        build = everywhere(storage_of(row_scheme(row)), method)
        linear = plain_linear(256, outputs, build, stored)
        for source in linear.sources():
            suffix = source.name.removeprefix("a")
            tensor = made.stored.get(suffix)
            assert source.load is not None
            source.load(made.stored[suffixes[suffix]] if tensor is None else tensor)
        whole, found = stored.extract("weight", outputs, made.whole), weight_of(linear)
        if isinstance(linear._weights, GroupedCodeWeights):
            torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(found, whole)


@pytest.mark.parametrize("method", [LinearMethod.PLAIN, LinearMethod.TILED])
def test_a_head_that_is_quantized_is_multiplied_on_a_gpu_as_others_are(
    method: LinearMethod,
) -> None:
    build = everywhere(storage_of(MXFP4), LinearMethod.GROUPED)
    head = VocabParallelEmbedding("head", 64, 64, build, method)
    assert isinstance(head._weights, PlainWeights)
    assert isinstance(head._weights, TiledWeights) == (method is LinearMethod.TILED)


def test_transposed_tensors_are_not_quantized() -> None:
    stored = CheckpointLayout(transposed=True)
    linear = plain_linear(64, 64, everywhere(storage_of(MXFP4)), stored)
    with pytest.raises(ValueError, match=r"a: weights stored as \(inputs, outputs\) are not"):
        list(linear.sources())


@pytest.mark.parametrize(
    ("method", "suffix", "message"),
    [
        ("gptq in order of size", "g_idx", "group indices of inputs exceed the 4 groups"),
        ("gptq asymmetric", "bias", r"unexpected: model\.layers\.0\.mlp\.up_proj\.bias$"),
    ],
    ids=["an input of a group that is not there", "a tensor of no linear that is not blank"],
)
def test_tensors_that_are_one_more_are_refused(
    tmp_path: Path, method: str, suffix: str, message: str
) -> None:
    stored, _ = write(tmp_path, BY_NAME[method])
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    change_tensors(stored, lambda tensors: tensors | {name: tensors[name] + 1})
    with pytest.raises(ModelLoadError, match=message):
        load(stored)


def test_a_linear_whose_tensors_contradict_its_config_is_named(tmp_path: Path) -> None:
    stored, _ = write(tmp_path, BY_NAME["fp8 block"])
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(stored, lambda tensors: tensors | {name: tensors[name].float()})
    with pytest.raises(ModelLoadError, match=f"{name} float32, not float8_e4m3fn"):
        load(stored)
    change_config(stored, quantization_config=None)
    with pytest.raises(ModelLoadError, match="not float32 or bfloat16 or float16"):
        load(stored)


NV_NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("weight_scale", lambda one: one[:, :-1].contiguous(), r"weight_scale \(320, 15\), not"),
        ("weight", lambda one: one[:, :-8].contiguous(), r"weight \(320, 120\), not \(320, 128\)"),
        ("weight_scale", lambda one: one.float(), "weight_scale float32, not float8_e4m3fn"),
        ("weight_scale_2", torch.zeros_like, "weight_scale_2 0.0 is not a positive number"),
        ("weight_scale_2", None, "missing: .*weight_scale_2"),
    ],
)
def test_nvfp4_tensors_that_do_not_fit_are_named(
    tmp_path: Path, suffix: str, change: Change | None, message: str
) -> None:
    stored, _ = write(tmp_path, BY_NAME["nvfp4 of ModelOpt"])
    name = f"{NV_NAME}.{suffix}"

    def edited(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        one = tensors.pop(name)
        return tensors if change is None else tensors | {name: change(one)}

    change_tensors(stored, edited)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(stored)
    assert NV_NAME in str(caught.value)


def test_sizes_that_cannot_be_stored_so_are_named(tmp_path: Path) -> None:
    stored, _ = write(tmp_path, BY_NAME["awq"])
    overrides = json.dumps({"quantization_config": {"quant_method": "awq", "group_size": 96}})
    with pytest.raises(
        ModelLoadError, match=r"q_proj: 256 inputs .* divisible by the group size 96"
    ):
        load(find_files(stored, overrides=overrides))


def test_dummy_weights_are_plain_numbers(tmp_path: Path) -> None:
    stored, _ = write(tmp_path, BY_NAME["awq"])
    with pytest.raises(ModelLoadError, match="dummy weights are plain numbers"):
        load(find_files(stored, LoadFormat.DUMMY))
    nothing = json.dumps({"quantization_config": None})
    assert load(find_files(stored, LoadFormat.DUMMY, overrides=nothing)).spec.layers
