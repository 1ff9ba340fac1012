"""The `cpu` backend of operations."""

from __future__ import annotations

from antiphon.kernels.cpu import extension
from antiphon.kernels.op import Backend


def cpu(target: str) -> Backend:
    """A backend that runs `target`, a `module:function`.

    All CPU kernels are batch-invariant: the order of computing a row depends on that row alone.
    """
    return Backend("cpu", target, extension.unsupported_reason, invariant=True)
