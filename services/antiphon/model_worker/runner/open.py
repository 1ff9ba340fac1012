"""Opens a model folder as a runner with its cache, as the worker's service needs it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.kernels.op import table
from antiphon.model_card.files import files_at
from antiphon.model_worker.model.cache_scales import scales_digest
from antiphon.model_worker.model.load import load
from antiphon.model_worker.runner.memory import STATES, cache_groups
from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.pooling import Pooler
from antiphon.model_worker.runner.quantized_cache import require_native_reads

if TYPE_CHECKING:
    from antiphon.layers.context import Adapters
    from antiphon.layers.tp import Tp
    from antiphon.model_card.files import ModelLocation
    from antiphon.model_card.pooling import Pooling
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.model.spec import ModelSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A loaded model, ready to run plans whose page tables are in the order of `groups`.

    Attributes:
        kv_scales: Digest of the scales of an 8-bit KV cache; empty without scales.
    """

    runner: ModelRunner
    groups: tuple[CacheGroup, ...]
    spec: ModelSpec
    kv_scales: str = ""


def open_model(
    place: ModelLocation,
    *,
    page_tokens: int,
    pages: int,
    states: int = STATES,
    dtype: str = "auto",
    linear: str = "plain",
    quantization: str | None = None,
    quantized: str | None = None,
    device: str = "cpu",
    tp: Tp | None = None,
    adapters: Adapters | None = None,
    deterministic: bool = False,
    implementation: str = "auto",
    pooling: Pooling | None = None,
    cache_dtype: str = "auto",
    cache_scales: str = "",
) -> OpenModel:
    """Load a model and allocate `pages` pages a cache group, or `states`.

    With `pooling` it makes vectors of prompts. See `load` and `ModelRunner`.

    Raises:
        ModelLoadError: The folder cannot be served; raised before anything runs.
        KernelUnavailable: This build does not support the device, deterministic mode or an 8-bit
            KV cache there.
    """
    model = load(
        place,
        dtype=dtype,
        linear=linear,
        quantization=quantization,
        quantized=quantized,
        device=device,
        tp=tp,
        implementation=implementation,
        headless=pooling is not None,
        cache_dtype=cache_dtype,
        cache_scales=cache_scales,
    )
    groups = cache_groups(
        model.spec, model.build, page_tokens=page_tokens, pages=pages, states=states
    )
    pooler = None if pooling is None else Pooler.open(pooling, files_at(place).folder, model)
    runner = ModelRunner(
        model, groups, adapters=adapters, pooler=pooler, deterministic=deterministic
    )
    require_native_reads(model, runner.choices)
    log.info("kernels", extra={"table": "\n" + table(runner.choices)})
    return OpenModel(runner, groups, model.spec, scales_digest(model.kv_scales))
