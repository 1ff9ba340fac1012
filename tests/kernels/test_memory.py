"""Memory in huge pages: zeros, apart from each other, and returned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.extension import huge_zeros

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
