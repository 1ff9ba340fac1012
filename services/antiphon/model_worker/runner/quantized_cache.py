"""A cache in eight bits: read where that costs nothing, or nothing starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.kernels.op import REFERENCE, KernelUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.kernels.op import BackendChoice
    from antiphon.model_worker.model.load import LoadedModel

READERS = frozenset({"attention.paged", "attention.shaped"})
"""Operations that read a cache at every token."""


def require_native_reads(model: LoadedModel, choices: Iterable[BackendChoice[..., object]]) -> None:
    """Check that no operation of the model reads a cache in eight bits by way of torch.

    Raises:
        KernelUnavailable: One does; says which.
    """
    if model.build.cache_dtype is None:
        return
    for choice in choices:
        if choice.op in READERS & model.decoder.operations and choice.backend == REFERENCE:
            raise KernelUnavailable(
                f"fp8 KV cache: {choice.op}, which this model needs, runs on torch, which converts "
                "fp8 ten times slower than attention reads it"
            )
