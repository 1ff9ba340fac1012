from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from antiphon.kernels import op
from antiphon.kernels.attention import paged_attention
from antiphon.kernels.cpu import extension, ops
from antiphon.kernels.cpu.extension import huge_zeros
from antiphon.kernels.flashinfer import plans
from antiphon.kernels.latent import store_latents
from antiphon.kernels.op import Backend, DeviceCapability, KernelUnavailable, Op, kernel, table
from antiphon.kernels.ops import select
from antiphon.kernels.rotary import qk_norm_rope_store
from antiphon.kernels.triton import backend
from antiphon.model_worker.startup import gpu
from antiphon.model_worker.startup.gpu import gpu_numerics
from antiphon.model_worker.startup.host_device import host_device
from antiphon.resolve.device import PlanMemory

CPU = DeviceCapability("cpu")
GPU = DeviceCapability("cuda")


def needs_gpu(device: DeviceCapability) -> str | None:
    return None if device.kind == "cuda" else "there is no GPU"


@kernel("test.double", Backend("fast", "operator:index", needs_gpu))
def double(x: int) -> int:
    return 2 * x


def test_the_reference_runs_where_no_backend_can() -> None:
    choice = double.select(CPU)
    assert (choice.backend, choice.call(4)) == ("torch", 8)
    assert choice.refused == (("fast", "there is no GPU"),)


def test_the_first_backend_that_can_run_is_chosen() -> None:
    choice = double.select(GPU)
    assert (choice.backend, choice.call(4)) == ("fast", 4)


def test_the_reference_can_be_forced() -> None:
    assert double.select(GPU, "torch").refused == (("fast", "torch is forced"),)


def test_a_forced_backend_is_never_silently_replaced() -> None:
    with pytest.raises(KernelUnavailable, match="there is no GPU"):
        double.select(CPU, "fast")
    with pytest.raises(KernelUnavailable, match="no such backend"):
        double.select(GPU, "faster")


@kernel("test.half", Backend("fast", "operator:index", needs_gpu, fixed="operator:neg"))
def half(x: int) -> int:
    return x // 2


def test_a_way_that_is_invariant_is_taken_where_it_is_asked_for() -> None:
    plain, fixed = half.select(GPU), half.select(GPU, invariant=True)
    assert (plain.backend, plain.call(4), plain.invariant) == ("fast", 4, False)
    assert (fixed.backend, fixed.call(4), fixed.invariant) == ("fast", -4, True)
    assert not double.select(GPU, invariant=True).invariant
    assert half.select(CPU, invariant=True).backend == "torch"


def test_a_forced_op_that_does_not_exist_is_refused() -> None:
    with pytest.raises(KernelUnavailable, match=r"norm\.rms"):
        select(CPU, {"norm.rms": "torch"})


def test_every_registered_op_is_chosen_and_printed() -> None:
    choices = select(CPU).choices
    assert {choice.op for choice in choices} == set(op.REGISTRY) - {"test.double", "test.half"}
    assert table(choices).count("\n") == len(choices) - 1


def test_the_table_gives_the_reason_why_a_backend_does_not_run() -> None:
    assert "not fast: there is no GPU" in table([double.select(CPU)])


@pytest.mark.parametrize(
    "reading", [paged_attention, qk_norm_rope_store, store_latents], ids=lambda each: each.name
)
def test_a_gpu_that_does_not_convert_e4m3_has_no_such_cache(reading: Op[..., object]) -> None:
    (row,) = (each for each in reading.backends if each.name == "triton")
    old = DeviceCapability("cuda", torch.bfloat16, 86, torch.float8_e4m3fn)
    assert row.needs(old) == "sm_86 does not convert float8_e4m3fn; float8_e5m2 it does"
    assert row.needs(replace(old, cache_dtype=torch.float8_e5m2)) is None
    assert row.needs(replace(old, sm=89)) is None


pytestmark = pytest.mark.skipif(
    bool(extension.unavailable_reason()), reason=str(extension.unavailable_reason())
)

MIB = 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.uint8])
def test_a_piece_is_zeros_of_its_shape(dtype: torch.dtype) -> None:
    piece = huge_zeros(3, 5, 7, dtype=dtype)
    assert (piece.shape, piece.dtype, piece.is_contiguous()) == ((3, 5, 7), dtype, True)
    assert not bool(piece.any())
    assert piece.data_ptr() % 64 == 0


def test_pieces_do_not_touch_each_other() -> None:
    pieces = [huge_zeros(size, dtype=torch.uint8) for size in (1, 63, 64, 65, 40 * MIB, 9, MIB)]
    for number, piece in enumerate(pieces, start=1):
        piece.fill_(number)
    for number, piece in enumerate(pieces, start=1):
        assert bool((piece == number).all())


def test_memory_returns_when_its_last_piece_is_gone() -> None:
    before = resident_bytes()
    pieces = [huge_zeros(50 * MIB, dtype=torch.uint8).fill_(1) for _ in range(3)]
    assert resident_bytes() - before > 140 * MIB
    kept = pieces.pop().clone()
    del pieces
    assert resident_bytes() - before < 60 * MIB
    assert bool((kept == 1).all())


def test_the_numerics_of_a_device_name_the_sources_of_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored pages outlive a worker: those of other kernels are not found."""
    before = gpu_numerics("interpreter")
    assert before["kernels"].startswith(f"{backend.version()} by triton ")
    for path in backend.SOURCES.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(backend, "SOURCES", tmp_path)
    assert gpu_numerics("interpreter") == before
    (tmp_path / "attention.py").write_text("# another order of sums\n")
    assert gpu_numerics("interpreter") != before


def test_memory_of_flashinfer_is_that_of_a_device_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "modules_version", lambda: None)
    assert host_device("interpreter").plan_memory is None
    monkeypatch.setattr(gpu, "modules_version", lambda: "0.7.4")
    taken = PlanMemory(plans.STEP_BYTES, plans.WRAPPER_BYTES)
    assert host_device("interpreter").plan_memory == taken
    assert plans.STEP_BYTES > plans.workspace(torch.device("meta")).nbytes == 128 * MIB


def test_what_an_import_asks_a_module_for_needs_no_extension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load() -> None:
        raise ImportError("not built")

    monkeypatch.setattr(extension, "load", load)
    assert not hasattr(ops, "__path__")
    with pytest.raises(ImportError, match="not built"):
        ops.rmsnorm  # noqa: B018 (what is looked up)
