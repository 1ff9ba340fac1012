"""The `cpu` rows of operations."""

from __future__ import annotations

from antiphon.kernels.cpu import extension
from antiphon.kernels.op import Backend


def cpu(target: str) -> Backend:
    """A row that runs `target`, a `module:function`.

    All of them are invariant: a row is computed in an order that depends on that row alone.
    """
    return Backend("cpu", target, extension.unsupported_reason, invariant=True)
