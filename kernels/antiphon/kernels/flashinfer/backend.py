"""The backend `flashinfer` of an op: what FlashInfer needs of a device and a model.

Its package has no binaries: a module of them is built ahead of time, or compiled when it is first
called, which would take minutes of a request. So the modules that a model needs are loaded when
backends are chosen, and one that is not built refuses the backend.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from antiphon.kernels.op import Backend
from antiphon.kernels.triton.backend import INTERPRETER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from antiphon.kernels.op import AttentionFeatures, DeviceCapability

PACKAGE = "flashinfer"
DISABLE_JIT = "FLASHINFER_DISABLE_JIT"
"""FlashInfer reads it whenever a module is loaded: what is missing raises and is not compiled."""
MODULES = "flashinfer-jit-cache"
"""A package of modules that are built ahead of time; `build` adds others to FlashInfer's own."""
SM_MIN = 80
"""The first compute capability that has the asynchronous copies of its kernels."""
FA3_SM = 90
"""The only compute capability that has the instructions of its FlashAttention-3 kernels."""
DTYPES = (torch.float16, torch.bfloat16)
LATENT_TILE = 128
"""Queries of a tile of latent attention, all heads of a token behind each other."""
NO_POSITIONS = 0
"""RoPE is applied before keys are cached."""

UNUSABLE = (ImportError, OSError, RuntimeError)
"""What importing the package, or loading a module, raises: it is not for this torch, say."""

Kernels = Literal["fa2", "fa3"]
"""Which of FlashInfer's kernels; its others need binaries that are downloaded while serving."""


def flashinfer(target: str) -> Backend:
    """The backend `flashinfer` of an op: a function `module:name` of its package.

    How it splits a row depends on the other rows: it is not batch-invariant.
    """
    return Backend(PACKAGE, f"antiphon.kernels.flashinfer.{target}", _unsupported_reason)


def modules_version() -> str | None:
    """The version of the modules that are built ahead of time; None: there are none."""
    package = f"{PACKAGE}-python" if _are_in_package() else MODULES
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _are_in_package() -> bool:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return False
    return any(Path(spec.origin).parent.glob("data/aot/*/*.so"))


def prefill_kernels(sm: int | None, dtype: torch.dtype, cache_dtype: torch.dtype) -> Kernels:
    """The kernels of prefills: those of FlashAttention-3 do not convert an 8-bit KV cache."""
    return "fa3" if sm == FA3_SM and dtype == cache_dtype else "fa2"


def _unsupported_reason(device: DeviceCapability) -> str | None:
    if device.kind not in ("cuda", INTERPRETER):
        return "it runs on CUDA only"
    if device.sm is not None:
        if device.sm < SM_MIN:
            return f"its kernels are not written for sm_{device.sm}"
        if device.dtype not in DTYPES:
            return f"it does not compute in {str(device.dtype).removeprefix('torch.')}"
    for latents in (features for features in device.attention if features.latent):
        if device.cache_dtype is not None:
            return "its kernels of latent attention (MLA) are not built for a KV cache of 8 bits"
        # Where a tile ends between the heads of a token, a prefill may lose a key, and is refused.
        if LATENT_TILE % latents.heads:
            divide = f"numbers of heads that divide {LATENT_TILE}, and not {latents.heads}"
            return f"its kernels of latent attention (MLA) take {divide}"
    if importlib.util.find_spec(PACKAGE) is None:
        return "flashinfer-python is not installed"
    if importlib.util.find_spec(MODULES.replace("-", "_")) is None and not _are_in_package():
        return "its modules are not built ahead of time"
    return next(_missing_modules(device), None)


def _missing_modules(device: DeviceCapability) -> Iterator[str]:
    """Load the modules that the model needs  ->  of each that does not load, why."""
    os.environ[DISABLE_JIT] = "1"
    try:  # it raises if its modules are of another version
        missing = importlib.import_module(f"{PACKAGE}.jit").MissingJITCacheError
        loaders = [*module_loaders(device)]
    except UNUSABLE as error:
        yield f"it cannot be imported: {error}"
        return
    for name, load in loaders:
        try:
            load()
        except UNUSABLE as error:
            lacks = "it is not built ahead of time" if isinstance(error, missing) else str(error)
            yield f"its module {name}: {lacks}"


def module_loaders(device: DeviceCapability) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each module that the model needs: a name for people, and what loads it.

    What is not built is compiled, unless `DISABLE_JIT` is set: that raises.
    """
    load = importlib.import_module(f"{PACKAGE}.prefill").get_batch_prefill_module
    latents = importlib.import_module(f"{PACKAGE}.jit").gen_batch_mla_module
    cache_dtype = device.cache_dtype or device.dtype
    chosen = prefill_kernels(device.sm, device.dtype, cache_dtype)
    for features in device.attention:
        arguments = module_arguments(features, device.dtype, cache_dtype)
        for kernels in (chosen,) if features.latent else dict.fromkeys(("fa2", chosen)):
            values = kernels, *arguments.values()
            loads = partial(_load, latents, *values) if features.latent else partial(load, *values)
            yield _module_name(kernels, arguments), loads


def _load(described: Callable[..., Any], *arguments: object) -> object:
    return described(*arguments).build_and_load()


def module_arguments(
    features: AttentionFeatures, dtype: torch.dtype, cache_dtype: torch.dtype
) -> dict[str, object]:
    """What a module is compiled for, in the order in which FlashInfer names it."""
    dtypes: dict[str, object] = {
        "dtype_q": dtype,
        "dtype_kv": cache_dtype,
        "dtype_o": dtype,
        "dtype_idx": torch.int32,
    }
    if features.latent:
        return {
            **dtypes,
            "head_dim_ckv": features.latent,
            "head_dim_kpe": features.head_size - features.latent,
            "use_profiler": False,
        }
    return {
        **dtypes,
        "head_dim_qk": features.head_size,
        "head_dim_vo": features.head_size,
        "pos_encoding_mode": NO_POSITIONS,
        "use_sliding_window": features.window,
        "use_logits_soft_cap": features.softcap,
        "use_fp16_qk_reduction": False,
        "use_token_head_sf": False,
    }


def _module_name(kernels: Kernels, arguments: dict[str, object]) -> str:
    query, cached = (
        str(arguments[name]).removeprefix("torch.") for name in ("dtype_q", "dtype_kv")
    )
    if "head_dim_ckv" in arguments:
        latent, rotated = arguments["head_dim_ckv"], arguments["head_dim_kpe"]
        return f"{kernels} of latents of {latent} numbers and {rotated} rotated ones in {query}"
    words = [f"{kernels} of {arguments['head_dim_qk']} numbers a head in {query}"]
    if cached != query:
        words.append(f"cached in {cached}")
    if arguments["use_sliding_window"]:
        words.append("with a window")
    if arguments["use_logits_soft_cap"]:
        words.append("with a soft cap")
    return ", ".join(words)
