"""Deterministic mode: every chosen kernel must be batch-invariant, or the worker does not start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.kernels.op import KernelUnavailable

BLOCKS = frozenset(
    {
        *("norm.rmsnorm", "norm.add_rmsnorm", "norm.rmsnorm_wide", "norm.layernorm"),
        *("norm.squares", "activation.silu_mul", "activation.gate", "activation.plain"),
        *("norm.gated_rmsnorm", "recurrent.conv", "recurrent.ssd", "recurrent.gated_delta"),
        *("attention.heads", "attention.paged", "attention.shaped", "attention.whole"),
    }
)
"""Operations of layers, which only some models call."""

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.kernels.op import BackendChoice
    from antiphon.model_worker.model.load import LoadedModel


def require_invariant(model: LoadedModel, choices: Iterable[BackendChoice[..., object]]) -> None:
    """Check that the bits of a row depend on that row alone in everything a forward pass computes.

    Raises:
        KernelUnavailable: A kernel's order of summation depends on the batch; names it and why no
            better one was chosen.
    """
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
