"""What the chosen kernels must do for a mode, or the worker does not start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.kernels.op import REFERENCE, KernelUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.kernels.op import BackendChoice
    from antiphon.model_worker.model.load import LoadedModel

BLOCKS = frozenset(
    {
        *("norm.rmsnorm", "norm.add_rmsnorm", "norm.rmsnorm_wide", "norm.layernorm"),
        *("norm.squares", "activation.silu_mul", "activation.gate", "activation.plain"),
        *("norm.gated_rmsnorm", "recurrent.conv", "recurrent.ssd", "recurrent.gated_delta"),
        *("attention.heads", "attention.paged", "attention.shaped", "attention.whole"),
    }
)
"""Operations of layers, which only some models call."""


def require_invariant(model: LoadedModel, choices: Iterable[BackendChoice[..., object]]) -> None:
    """Deterministic mode: check that the bits of a row depend on that row alone."""
    if not model.decoder.invariant:
        raise KernelUnavailable(
            "deterministic inference: results of torch's matmul depend on batch composition; "
            "set model.linear to packed"
        )
    if model.build.tp.ranks > 1:
        raise KernelUnavailable("deterministic inference: only one rank is supported")
    others = BLOCKS - model.decoder.operations
    for choice in choices:
        if not choice.invariant and choice.op not in others:
            reasons = "; ".join(f"not {name}: {reason}" for name, reason in choice.refused)
            raise KernelUnavailable(
                f"deterministic inference: {choice.op} runs on {choice.backend}, whose "
                f"results depend on batch composition ({reasons})"
            )


READERS = frozenset({"attention.paged", "attention.shaped"})
"""Operations that read the cache for every token."""


def require_native_reads(model: LoadedModel, choices: Iterable[BackendChoice[..., object]]) -> None:
    """8-bit KV cache: check that no operation of the model reads it through torch."""
    if model.build.cache_dtype is None:
        return
    for choice in choices:
        if choice.op in READERS & model.decoder.operations and choice.backend == REFERENCE:
            raise KernelUnavailable(
                f"fp8 KV cache: {choice.op}, which this model needs, runs on torch, which converts "
                "fp8 ten times slower than attention reads it"
            )
