"""What a worker computes and caches in, with which kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError
from antiphon.config.model import CacheDtype, Dtype, KernelBackend, LinearFormat
from antiphon.resolve.device import INTERPRETER
from antiphon.resolve.memory import BIDIRECTIONAL
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from antiphon.config.model import ModelConfig
    from antiphon.config.parallel import ParallelConfig
    from antiphon.config.settings import Settings
    from antiphon.model_card.card import ModelCard
    from antiphon.resolve.device import HostDevice
    from antiphon.resolve.memory import WeightStorage

ANY_BACKENDS = ResolvedValue[tuple[str, ...]]((), "the first of each operation that runs here")


def resolve_backends(model: ModelConfig) -> ResolvedValue[tuple[str, ...]]:
    """The backends that the settings name, as `operation:backend`."""
    said = {
        "model.attention_backend": model.attention_backend,
        "model.prefill_attention_backend": model.prefill_attention_backend,
        "model.decode_attention_backend": model.decode_attention_backend,
    }
    named = {name: backend for name, backend in said.items() if backend is not KernelBackend.AUTO}
    if len(set(named.values())) > 1:
        listed = ", ".join(f"{name} = {backend}" for name, backend in named.items())
        raise ConfigError(
            f"{listed}: prefills and decodes are rows of one pass, which one kernel attends in"
        )
    asked = {
        "attention.paged": next(iter(named.values()), KernelBackend.AUTO),
        "sampling.draw": model.sampling_backend,
        "moe.experts": model.expert_backend,
        "linear.fp8": model.fp8_backend,
    }
    forced = [f"{op}:{name}" for op, name in asked.items() if name is not KernelBackend.AUTO]
    if not forced:
        return ANY_BACKENDS
    return ResolvedValue(tuple(forced), "as model.*_backend name them")


def resolve_dtype(settings: Settings, card: ModelCard, device: HostDevice) -> ResolvedValue[Dtype]:
    if settings.model.dtype is not Dtype.AUTO:
        return ResolvedValue(settings.model.dtype, "model.dtype")
    if device.kind == INTERPRETER:
        return ResolvedValue(Dtype.FLOAT32, "the interpreter is compared with the CPU")
    # Most tensors of a GGUF file whose dtype is unknown are in blocks, grouped or not.
    in_blocks = card.gguf and card.weights.bytes > 0 and card.weights.dtype is None
    quantized = card.quantization is not None or card.weights.grouped > 0 or in_blocks
    if quantized and device.lacking is None and card.dtype is not Dtype.BFLOAT16:
        # What its unquantized tensors are stored in says little of the precision of its weights.
        reason = f"weights are quantized; their activations need not be {card.dtype}"
        return ResolvedValue(Dtype.BFLOAT16, reason)
    return ResolvedValue(card.dtype, "the checkpoint's")


def resolve_linear(
    settings: Settings, device: HostDevice, dtype: Dtype
) -> ResolvedValue[LinearFormat]:
    said, lacking = settings.model.linear, _lacking(device, dtype)
    if said is LinearFormat.TILED and device.kind == "cpu":
        raise ConfigError("model.linear = tiled: runs on a GPU only; packed is the same on the CPU")
    if device.kind != "cpu" and settings.model.deterministic and said is LinearFormat.AUTO:
        return ResolvedValue(
            LinearFormat.TILED, "model.deterministic; weights in fp8 are converted"
        )
    if said is LinearFormat.TILED:
        return ResolvedValue(said, "model.linear")
    if said is LinearFormat.AUTO and lacking is None:
        return ResolvedValue(LinearFormat.PACKED, "read at memory bandwidth, stored once")
    if said is LinearFormat.AUTO:
        return ResolvedValue(LinearFormat.PLAIN, lacking or "")
    if said is LinearFormat.FP8:
        if device.lacking_fp8 is not None:
            raise ConfigError(f"model.linear = {said}: {device.lacking_fp8}")
        return ResolvedValue(LinearFormat.PLAIN, "model.linear = fp8; not stored in fp8")
    if said is LinearFormat.GROUPED and device.kind != "cpu":
        return ResolvedValue(LinearFormat.PLAIN, "model.linear = grouped; not stored in groups")
    if said is not LinearFormat.PLAIN and lacking is not None:
        raise ConfigError(f"model.linear = {said}: {lacking}")
    if said is LinearFormat.GROUPED:
        return ResolvedValue(LinearFormat.PACKED, "model.linear = grouped; not stored in groups")
    return ResolvedValue(said, "model.linear")


def _lacking(device: HostDevice, dtype: Dtype) -> str | None:
    float16 = "the CPU kernels do not support float16" if dtype is Dtype.FLOAT16 else None
    return device.lacking or float16


def resolve_cache_dtype(
    settings: Settings, card: ModelCard, device: HostDevice, dtype: Dtype
) -> ResolvedValue[CacheDtype]:
    said = settings.cache.dtype
    if said is CacheDtype.AUTO:
        return ResolvedValue(CacheDtype(dtype.value), "the model's dtype")
    if not said.eight_bits:
        if said.value != dtype.value:
            raise ConfigError(f"cache.dtype = {said}: must be auto, fp8 or the model's {dtype}")
        return ResolvedValue(said, "cache.dtype, equal to the model's dtype")
    if not card.kv_bytes(dtype):
        raise ConfigError(f"cache.dtype = {said}: this model has no KV cache: {BIDIRECTIONAL}")
    if device.kind == "cpu" and (lacking := _lacking(device, dtype)) is not None:
        raise ConfigError(
            f"cache.dtype = {said}: needs the CPU kernels; torch converts fp8 ten times slower "
            f"than attention reads it: {lacking}"
        )
    return ResolvedValue(said, "cache.dtype; converted as attention reads it")


def resolve_cache_scales(settings: Settings, kept: CacheDtype) -> ResolvedValue[str]:
    said = settings.cache.scales
    if said and not kept.eight_bits:
        raise ConfigError(f"cache.scales = {said}: only fp8 has scales, and cache.dtype is {kept}")
    if said:
        return ResolvedValue(said, "cache.scales")
    if kept.eight_bits:
        return ResolvedValue("", "from the checkpoint; 1.0 for layers without one")
    return ResolvedValue("", "the KV cache is not fp8")


def resolve_deterministic(
    settings: Settings, linear: ResolvedValue[LinearFormat], card: ModelCard
) -> ResolvedValue[bool]:
    if not settings.model.deterministic:
        return ResolvedValue(value=False, reason="model.deterministic")
    if linear.value is LinearFormat.PLAIN:
        raise ConfigError(
            "model.deterministic: results of torch's matmul depend on batch composition, and "
            f"model.linear is plain ({linear.reason})"
        )
    reason = "results of the kernels do not depend on batch composition"
    return ResolvedValue(value=True, reason=reason)


def numerics_digest(
    device: HostDevice,
    card: ModelCard,
    dtype: Dtype,
    linear: LinearFormat,
    kept: WeightStorage,
    cache: CacheDtype,
    parallel: ParallelConfig,
    backends: tuple[str, ...],
) -> ResolvedValue[str]:
    """In the form of a config digest, so that differing fields of two workers can be named."""
    parts = {"dtype": str(dtype), "linear": str(linear), **kept.numerics, **device.arithmetic}
    if cache.eight_bits:
        parts["cache"] = str(cache)
    parts |= dict(each.split(":") for each in backends)
    if card.rope_factors is not None:
        parts["rope"] = card.rope_factors
    if parallel.tp_size > 1:
        parts["ranks"] = str(parallel.tp_size)
    if parallel.ep_size > 1:
        parts["expert ranks"] = str(parallel.ep_size)
    if parallel.pp_size > 1:
        parts["stages"] = str(parallel.pp_size)
    if parallel.attn_dp_size > 1:
        parts["attention groups"] = str(parallel.attn_dp_size)
    text = ",".join(f"{name}:{value}" for name, value in parts.items())
    return ResolvedValue(text, "what the numerics depend on, besides the model")
