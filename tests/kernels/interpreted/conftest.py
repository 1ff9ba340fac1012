"""These files run in a process of their own: `tests/kernels/test_triton.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from antiphon.kernels.triton import interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

# Triton interprets kernels from its first import on.
interpreter.enable()


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory that is not written is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    with np.errstate(over="ignore"):  # of an exponential, which is infinite then, as on a GPU
        yield
    torch.use_deterministic_algorithms(False)
