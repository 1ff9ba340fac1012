"""What a model asks of the kernels of its device, checked before it is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from antiphon.kernels.op import (
    REFERENCE,
    AttentionFeatures,
    BackendChoice,
    DeviceCapability,
    KernelUnavailable,
)
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.mla import LatentSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from antiphon.layers.weights import BuildContext
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.model_worker.model.spec import ModelSpec

SAMPLING = frozenset(
    {
        *("rows.finite", "sampling.penalize", "sampling.mask", "sampling.bias"),
        *("sampling.log_mass", "sampling.greedy", "sampling.draw"),
        *("futures.resolve", "futures.record", "rows.decode"),
    }
)
"""Operations that every model calls."""
BLOCKS = frozenset(
    {
        *("norm.rmsnorm", "norm.add_rmsnorm", "norm.rmsnorm_wide", "norm.layernorm"),
        *("norm.squares", "activation.silu_mul", "activation.gate", "activation.plain"),
        *("activation.sigmoid_mul", "recurrent.layer"),
        *("attention.heads", "attention.latents", "attention.paged", "attention.whole"),
        *("logits.softcap", "moe.experts", "linear.fp8", "linear.grouped", "linear.int8"),
        *("linear.tiled", "linear.heads"),
    }
)
"""Operations of layers and heads, which only some models call."""


def capability_of(build: BuildContext, spec: ModelSpec) -> DeviceCapability:
    """The facts about a model and its device."""
    sm = None
    if build.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(build.device)
        sm = 10 * major + minor
    attention = tuple(dict.fromkeys(_attention_of(spec, build.of_mixers.tp.ranks)))
    return DeviceCapability(build.device_kind, build.dtype, sm, build.cache_dtype, attention)


def _attention_of(spec: ModelSpec, ranks: int) -> Iterator[AttentionFeatures]:
    for mixer in (mixer for layer in spec.layers for mixer in layer.mixers):
        if isinstance(mixer, LatentSpec):
            cache, heads = mixer.cache, mixer.query_heads // ranks
            yield AttentionFeatures(cache.head_size, latent=cache.latent, heads=heads)
        elif isinstance(mixer, AttentionSpec) and mixer.causal:
            window = mixer.window is not None and not mixer.chunked
            yield AttentionFeatures(mixer.head_size, window, mixer.softcap is not None)


def require_kernels(model: LoadedModel, choices: Iterable[BackendChoice[..., object]]) -> None:
    """Check that no operation of the model runs on torch, on a device that is not the CPU."""
    kind, called = model.build.device_kind, SAMPLING | model.decoder.operations
    for choice in choices:
        if choice.op in called and choice.backend == REFERENCE:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.refused)
            raise KernelUnavailable(
                f"device {kind}: {choice.op}, which this model needs, has no kernel there"
                + (f" ({reasons})" if reasons else "")
            )


def require_invariant(model: LoadedModel, choices: Iterable[BackendChoice[..., object]]) -> None:
    """Deterministic mode: check that the bits of a row depend on that row alone."""
    if (kind := model.build.device_kind) != "cpu" and model.spec.streams is not None:
        # There torch sums a row by more threads where there are fewer rows, and so in other orders.
        raise KernelUnavailable(
            f"deterministic inference: device {kind}: sums of several residual streams and of "
            "sparse gates have no batch-invariant kernel there"
        )
    if not model.decoder.invariant:
        raise KernelUnavailable(
            "deterministic inference: results of torch's matmul depend on batch composition; "
            "set model.linear to packed, or to tiled on a GPU"
        )
    build = model.build
    assert all(each.tp.invariant for each in (build, build.of_mixers)), "ranks sum in their order"
    others = BLOCKS - model.decoder.operations
    for choice in choices:
        if not choice.invariant and choice.op not in others:
            reasons = "; ".join(f"not {name}: {reason}" for name, reason in choice.refused)
            raise KernelUnavailable(
                f"deterministic inference: {choice.op} runs on {choice.backend}, whose "
                f"results depend on batch composition ({reasons})"
            )
