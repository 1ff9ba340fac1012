from __future__ import annotations

import pytest

from antiphon.kernels.op import (
    REGISTRY,
    Backend,
    DeviceCapability,
    KernelUnavailable,
    kernel,
    table,
)
from antiphon.kernels.ops import select

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


def test_a_forced_op_that_does_not_exist_is_refused() -> None:
    with pytest.raises(KernelUnavailable, match=r"norm\.rms"):
        select(CPU, {"norm.rms": "torch"})


def test_every_registered_op_is_chosen_and_printed() -> None:
    choices = select(CPU).choices
    assert {choice.op for choice in choices} == set(REGISTRY) - {"test.double"}
    assert table(choices).count("\n") == len(choices) - 1


def test_the_table_says_why_a_backend_does_not_run() -> None:
    assert "not fast: there is no GPU" in table([double.select(CPU)])
