"""What the page about kernels says of each: who launches it, and which mutants change it."""

from __future__ import annotations

import pytest
from tests.gpu.costs import TIMED
from tests.kernels.ahead_of_time import FEW_ELEMENTS, read_table
from tests.kernels.kernel_sources import (
    Part,
    changed_parts,
    kernels,
    mutants,
    mutants_of,
    operations_of,
)


def test_every_kernel_is_compiled_launched_by_an_operation_and_has_mutants() -> None:
    assert kernels() == sorted({row.kernel for row in read_table()})
    assert [name for name in kernels() if not operations_of(name)] == []
    assert [name for name in kernels() if not mutants_of(name)] == []
    assert set(kernels()) >= FEW_ELEMENTS.union(*TIMED.values())


def test_every_mutant_counts_for_some_kernel() -> None:
    assert len(mutants()) > 100
    counted = {mutant for name in kernels() for mutant in mutants_of(name)}
    assert [mutant for mutant in mutants() if mutant not in counted] == []


@pytest.mark.parametrize(
    ("module", "old", "parts", "counts"),
    [
        ("norm", "normed, mask=inside", ["rmsnorm_kernel"], ["norm.rmsnorm"]),
        (
            *("activation", "(rest + 1.0)", ["gated"]),
            ["activation.gated", "experts.gate_up", "experts_grouped.gate_up"],
        ),
        ("latent", "ceil_div(tokens, each)", ["store_latents"], ["latent.store"]),
        (
            *("experts", "min(DEPTH_BYTES, group & -group)", ["_inputs"]),
            ["experts.combine", "experts.down", "experts.gate_up"],
        ),
    ],
    ids=["kernel", "function of kernels", "launch", "what a launch calls"],
)
def test_a_mutant_counts_for_the_kernels_that_it_changes(
    module: str, old: str, parts: list[str], counts: list[str]
) -> None:
    (mutant,) = [each for each in mutants() if each[:2] == (module, old)]
    assert changed_parts(mutant) == [Part(module, name) for name in parts]
    found = [name for name in kernels() if mutant in mutants_of(name)]
    assert found == counts


def test_operations_are_found_through_what_other_modules_call() -> None:
    assert operations_of("expert_tiles.sort") == ["moe.experts"]
    assert operations_of("experts_grouped.down") == ["moe.experts"]
    assert "linear.fp8" in operations_of("rounding.quantize")
    assert operations_of("pages.gather") == ["pages.gather"]
