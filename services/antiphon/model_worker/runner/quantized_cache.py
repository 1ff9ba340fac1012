"""The 8-bit KV cache: kernels must read it natively, or the worker does not start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.kernels.op import REFERENCE, KernelUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.kernels.op import BackendChoice
    from antiphon.model_worker.model.load import LoadedModel

READERS = frozenset({"attention.paged", "attention.shaped"})
"""Operations that read the cache for every token."""


def require_native_reads(model: LoadedModel, choices: Iterable[BackendChoice[..., object]]) -> None:
    """Check that no operation of the model falls back to torch to read an 8-bit KV cache.

    Raises:
        KernelUnavailable: One does; names it.
    """
    if model.build.cache_dtype is None:
        return
    for choice in choices:
        if choice.op in READERS & model.decoder.operations and choice.backend == REFERENCE:
            raise KernelUnavailable(
                f"fp8 KV cache: {choice.op}, which this model needs, runs on torch, which converts "
                "fp8 ten times slower than attention reads it"
            )
