"""These files run in a process of their own: `tests/kernels/test_triton.py`, `tests/gpu`."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kernels.on_device import OnDevice

from antiphon.kernels.triton import interpreter
from antiphon.kernels.triton.backend import INTERPRETER

if TYPE_CHECKING:
    from collections.abc import Iterator

KERNELS = "antiphon.kernels.triton."


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on", default=INTERPRETER, help="where kernels run: interpreter, or cuda")
    parser.addoption("--last", action="store_true", help="run the last case of each test alone")


def pytest_configure(config: pytest.Config) -> None:
    if _device(config) == INTERPRETER:
        # Triton interprets kernels from its first import on.
        interpreter.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--last", default=False):
        items[:] = {item.nodeid.partition("[")[0]: item for item in items}.values()


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """Memory that is not written is NaN, or the largest integer."""
    # A GPU has sums whose order varies, which nothing here asks for.
    warns = _device(request.config) != INTERPRETER
    torch.use_deterministic_algorithms(True, warn_only=warns)
    with np.errstate(over="ignore"):  # of an exponential, which is infinite then, as on a GPU
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the modules of kernels that a file of tests names are `OnDevice`."""
    device = _device(request.config)
    if device == INTERPRETER:
        return
    for name, value in list(vars(request.module).items()):
        if isinstance(value, ModuleType) and value.__name__.startswith(KERNELS):
            monkeypatch.setattr(request.module, name, OnDevice(value, torch.device(device)))


def _device(config: pytest.Config) -> str:
    # Without an option, pytest has read this file while it collected others.
    return str(config.getoption("--on", default=INTERPRETER))
