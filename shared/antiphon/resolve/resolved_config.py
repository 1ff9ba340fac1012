"""Resolves settings and model card to the worker's plan: each decision has its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.model import CacheDtype, Dtype, LinearFormat
from antiphon.model_card.memory import (
    MemoryBudget,
    activation_bytes,
    gib,
    logits_bytes,
    prompt_logits_bytes,
)
from antiphon.model_card.pooling import Pooling, PoolMode
from antiphon.model_card.tasks import Task
from antiphon.resolve.resolved_value import ResolvedValue
from antiphon.resolve.state_pool import OVERLAPPED, RUNNING, state_count
from antiphon.resolve.step_limits import BIDIRECTIONAL, resolve_step_limits
from antiphon.resolve.weight_storage import WeightStorage, resolve_weight_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.config.settings import Settings
    from antiphon.model_card.card import ModelCard
    from antiphon.resolve.device import HostDevice

_VALUE_WIDTH = 16
"""A longer value shifts only its own reason."""
CACHED_BYTES_MAX = 64 << 20
"""Weights up to this size are read from CPU caches: steps are short, and services need a core."""


class ResolvedConfig(msgspec.Struct, frozen=True):
    """The worker's plan. No value is `auto` or unset."""

    device: ResolvedValue[str]
    dtype: ResolvedValue[Dtype]
    quantization: ResolvedValue[str]
    linear: ResolvedValue[LinearFormat]
    quantized: ResolvedValue[LinearFormat]
    implementation: ResolvedValue[str]
    pooling: ResolvedValue[Pooling | None]
    deterministic: ResolvedValue[bool]
    bits: ResolvedValue[str]
    threads: ResolvedValue[int]
    context_tokens: ResolvedValue[int]
    eos_ids: ResolvedValue[tuple[int, ...]]
    page_tokens: ResolvedValue[int]
    cache_dtype: ResolvedValue[CacheDtype]
    cache_scales: ResolvedValue[str]
    memory_bytes: ResolvedValue[int]
    weight_bytes: ResolvedValue[int]
    activation_bytes: ResolvedValue[int]
    logit_bytes: ResolvedValue[int]
    scored_bytes: ResolvedValue[int]
    cache_pages: ResolvedValue[int]
    cache_bytes: ResolvedValue[int]
    cache_states: ResolvedValue[int]
    state_bytes: ResolvedValue[int]
    step_tokens: ResolvedValue[int]
    whole_prompts: ResolvedValue[bool]
    chunk_tokens: ResolvedValue[int]
    fill_tokens: ResolvedValue[int]
    mixed: ResolvedValue[bool]
    prefix: ResolvedValue[bool]
    running_max: ResolvedValue[int]
    overlap: ResolvedValue[bool]
    grammar: ResolvedValue[str]

    @property
    def cache_tokens(self) -> int:
        """Capacity of the pool in tokens."""
        return self.cache_pages.value * self.page_tokens.value


def resolve(
    settings: Settings,
    card: ModelCard,
    device: HostDevice,
    pooling: Pooling | None = None,
    implementation: ResolvedValue[str] | None = None,
) -> ResolvedConfig:
    """Decide everything that the settings leave open. Pure; `device` was read before loading.

    Args:
        settings: The settings.
        card: The model card.
        device: The host device.
        pooling: The pooling of the model, if it is not generative.
        implementation: The model implementation, if known; None: by `settings`.

    Raises:
        ConfigError: The context exceeds the model's, memory is too small for the weights, the
            largest step and the cache (the message has the required size), or a requested option
            is not supported.
    """
    layers = implementation or ResolvedValue(settings.model.implementation, "model.implementation")
    if layers.value == "transformers":
        card = card.with_full_heads()
    free, device = device.memory_bytes, _within(settings, device)
    dtype = _dtype(settings, card)
    linear = _linear(settings, device, dtype.value)
    cache_dtype = _cache_dtype(settings, card, device, dtype.value)
    kept = resolve_weight_storage(settings, card, dtype.value, linear)
    context = _context(settings, card)
    page_tokens = settings.cluster.page_tokens
    taken = resolve_step_limits(settings, card, device, context.value)
    step = taken.step_tokens
    drawing = min(settings.batching.running_max, step.value)
    memory = _memory(settings, card, device, dtype.value, kept.bytes.value, step.value)
    state_bytes = card.state_bytes(dtype.value)
    states = state_count(settings, state_bytes, memory, _pool_bytes(settings, memory))
    held = states.value * state_bytes
    token_bytes = card.kv_bytes(cache_dtype.value)
    pages = _pages(settings, memory, token_bytes, context.value, held)
    overlap = _overlap(settings, device)
    return ResolvedConfig(
        device=_device(settings, device),
        dtype=dtype,
        quantization=kept.quantization,
        linear=linear,
        quantized=kept.quantized,
        deterministic=_deterministic(settings, linear, card),
        bits=_numerics_digest(device, card, dtype.value, linear.value, kept, cache_dtype.value),
        implementation=layers,
        pooling=_pooling(settings, pooling),
        threads=_threads(settings, device, linear.value, memory.weights),
        context_tokens=_fit(context, pages.value * page_tokens),
        eos_ids=ResolvedValue(
            card.eos_ids, "config.json, generation_config.json and the tokenizer"
        ),
        page_tokens=ResolvedValue(page_tokens, "cluster.page_tokens"),
        cache_dtype=cache_dtype,
        cache_scales=_cache_scales(settings, cache_dtype.value),
        memory_bytes=_free(settings, memory.free, free),
        weight_bytes=kept.bytes,
        activation_bytes=ResolvedValue(memory.activations, f"{step.value} tokens per step"),
        logit_bytes=ResolvedValue(memory.logits, f"{drawing} rows of logits"),
        scored_bytes=ResolvedValue(memory.scored, "prompt logprobs, computed in chunks"),
        cache_pages=pages,
        cache_bytes=ResolvedValue(
            pages.value * page_tokens * token_bytes, f"{token_bytes} bytes per token"
        ),
        cache_states=states,
        state_bytes=ResolvedValue(held, f"{state_bytes} bytes per state"),
        step_tokens=step,
        whole_prompts=taken.whole_prompts,
        chunk_tokens=taken.chunk_tokens,
        fill_tokens=taken.fill_tokens,
        mixed=taken.mixed,
        prefix=_prefix(taken.prefix, pooling),
        running_max=_running(settings, pages.value, step.value, states, overlap=overlap.value),
        overlap=overlap,
        grammar=_grammar(settings, card, pooling),
    )


def table(plan: ResolvedConfig) -> str:
    """The plan as aligned lines with the value and reason of each decision."""
    rows = list(_rows(plan))
    names = max(len(name) for name, _, _ in rows)
    values = max(len(value) for _, value, _ in rows if len(value) <= _VALUE_WIDTH)
    return "\n".join(
        f"{name:<{names}}  {value:>{values}}  {reason}" for name, value, reason in rows
    )


def _rows(plan: ResolvedConfig) -> Iterator[tuple[str, str, str]]:
    for name in plan.__struct_fields__:
        decided: ResolvedValue[object] = getattr(plan, name)
        value = decided.value
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        yield name, shown or "none", decided.reason


def _within(settings: Settings, device: HostDevice) -> HostDevice:
    """The share of the machine that a worker may use."""
    model = settings.model
    return msgspec.structs.replace(
        device,
        cores=min(model.cores or device.cores, device.cores),
        memory_bytes=min(model.memory_bytes or device.memory_bytes, device.memory_bytes),
    )


def _free(settings: Settings, used: int, free: int) -> ResolvedValue[int]:
    if used == settings.model.memory_bytes:
        return ResolvedValue(used, f"model.memory_bytes, of {gib(free)} free")
    return ResolvedValue(used, "free memory, within container limits")


def _device(settings: Settings, device: HostDevice) -> ResolvedValue[str]:
    if settings.model.device == "auto":
        return ResolvedValue(device.kind, "the device of this machine")
    return ResolvedValue(settings.model.device, "model.device")


def _dtype(settings: Settings, card: ModelCard) -> ResolvedValue[Dtype]:
    if settings.model.dtype is Dtype.AUTO:
        return ResolvedValue(card.dtype, "the checkpoint's")
    return ResolvedValue(settings.model.dtype, "model.dtype")


def _linear(settings: Settings, device: HostDevice, dtype: Dtype) -> ResolvedValue[LinearFormat]:
    said, lacking = settings.model.linear, device.lacking
    if lacking is None and dtype is Dtype.FLOAT16:
        lacking = "the CPU kernels do not support float16"
    if said is LinearFormat.AUTO and lacking is None:
        return ResolvedValue(LinearFormat.PACKED, "read at memory bandwidth, stored once")
    if said is LinearFormat.AUTO:
        return ResolvedValue(LinearFormat.PLAIN, lacking or "")
    if said is not LinearFormat.PLAIN and lacking is not None:
        raise ConfigError(f"model.linear = {said}: {lacking}")
    return ResolvedValue(said, "model.linear")


def _cache_dtype(
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
    lacking = device.lacking
    if lacking is None and dtype is Dtype.FLOAT16:
        lacking = "the CPU kernels do not support float16"
    if lacking is not None:
        raise ConfigError(
            f"cache.dtype = {said}: needs the CPU kernels; torch converts fp8 ten times slower "
            f"than attention reads it: {lacking}"
        )
    return ResolvedValue(said, "cache.dtype; converted as attention reads it")


def _cache_scales(settings: Settings, kept: CacheDtype) -> ResolvedValue[str]:
    said = settings.cache.scales
    if said and not kept.eight_bits:
        raise ConfigError(f"cache.scales = {said}: only fp8 has scales, and cache.dtype is {kept}")
    if said:
        return ResolvedValue(said, "cache.scales")
    if kept.eight_bits:
        return ResolvedValue("", "from the checkpoint; 1.0 for layers without one")
    return ResolvedValue("", "the KV cache is not fp8")


def _deterministic(
    settings: Settings, linear: ResolvedValue[LinearFormat], card: ModelCard
) -> ResolvedValue[bool]:
    if not settings.model.deterministic:
        return ResolvedValue(value=False, reason="model.deterministic")
    if card.states is not None:
        raise ConfigError(
            "model.deterministic: recurrent layers of this model run in torch, whose results "
            "depend on batch composition"
        )
    if not card.causal:
        raise ConfigError(
            "model.deterministic: attention of this model runs in torch, whose results depend on "
            "batch composition"
        )
    if linear.value is LinearFormat.PLAIN:
        raise ConfigError(
            "model.deterministic: results of torch's matmul depend on batch composition, and "
            f"model.linear is plain ({linear.reason})"
        )
    reason = "results of the CPU kernels do not depend on batch composition"
    return ResolvedValue(value=True, reason=reason)


def _numerics_digest(
    device: HostDevice,
    card: ModelCard,
    dtype: Dtype,
    linear: LinearFormat,
    kept: WeightStorage,
    cache: CacheDtype,
) -> ResolvedValue[str]:
    """In the form of a config digest, so that differing fields of two workers can be named."""
    parts = {"dtype": str(dtype), "linear": str(linear), **kept.numerics, **device.arithmetic}
    if cache.eight_bits:
        parts["cache"] = str(cache)
    if card.rope_factors is not None:
        parts["rope"] = card.rope_factors
    text = ",".join(f"{name}:{value}" for name, value in parts.items())
    return ResolvedValue(text, "what the numerics depend on, besides the model")


def _threads(
    settings: Settings, device: HostDevice, linear: LinearFormat, weights_bytes: int
) -> ResolvedValue[int]:
    if settings.model.threads is not None:
        return ResolvedValue(settings.model.threads, "model.threads")
    if linear is not LinearFormat.PLAIN and weights_bytes >= CACHED_BYTES_MAX:
        return ResolvedValue(device.cores, "all cores: kernel threads do not wait for each other")
    threads = max(1, device.cores - 1)
    if linear is LinearFormat.PLAIN:
        # torch's threads spin at every barrier: next to other busy processes, as many threads as
        # cores run up to 60 times slower than one fewer.
        return ResolvedValue(
            threads, f"one fewer than the {device.cores} cores: torch threads spin while waiting"
        )
    return ResolvedValue(
        threads, f"one fewer than the {device.cores} cores: steps of this model are short"
    )


def _context(settings: Settings, card: ModelCard) -> ResolvedValue[int]:
    said = settings.model.context_tokens
    turned = "" if card.rope_factors is None else f", with its {card.rope_factors} rope factors"
    if said is None:
        stretched = " times its rope scaling factor" if card.rope_kind == "dynamic" else ""
        reason = f"max_position_embeddings of the model{stretched}{turned}"
        return ResolvedValue(card.context_tokens, reason)
    check_context(settings, card)
    return ResolvedValue(said, f"model.context_tokens{turned}")


def check_context(settings: Settings, card: ModelCard) -> None:
    """Compare the configured context with the model's.

    Raises:
        ConfigError: It is longer; the message explains how to extend the model's.
    """
    said = settings.model.context_tokens
    if said is not None and said > card.context_tokens:
        override = f"--json-model-override-args '{{\"max_position_embeddings\": {said}}}'"
        raise ConfigError(
            f"model.context_tokens = {said} (--context-length): must not exceed the model's "
            f"{card.context_tokens}; to extend it, at reduced quality, add {override}"
        )


def _fit(context: ResolvedValue[int], cache_tokens: int) -> ResolvedValue[int]:
    if context.value <= cache_tokens:
        return context
    return ResolvedValue(
        cache_tokens, f"limited by the KV cache pool, of {context.value} ({context.reason})"
    )


def _memory(
    settings: Settings,
    card: ModelCard,
    device: HostDevice,
    dtype: Dtype,
    weights: int,
    step_tokens: int,
) -> MemoryBudget:
    memory = MemoryBudget(
        free=device.memory_bytes,
        weights=weights,
        activations=activation_bytes(card, dtype, step_tokens),
        logits=logits_bytes(card, min(settings.batching.running_max, step_tokens)),
        scored=prompt_logits_bytes(card, step_tokens),
    )
    if memory.weights > memory.free:
        limit = settings.model.memory_bytes
        cause = "" if limit is None else f"; model.memory_bytes = {limit} limits this worker"
        raise ConfigError(f"not enough memory for the weights: {memory}{cause}")
    return memory


def _pages(
    settings: Settings, memory: MemoryBudget, token_bytes: int, context_tokens: int, held: int
) -> ResolvedValue[int]:
    """The number of pages; `held` bytes of the pool are states."""
    page_tokens = settings.cluster.page_tokens
    page_bytes = page_tokens * token_bytes
    if settings.cache.tokens_max is not None:
        return _requested_pages(settings.cache.tokens_max, page_tokens, page_bytes, memory, held)
    enough = settings.batching.running_max * -(-context_tokens // page_tokens)
    if not page_bytes:
        return ResolvedValue(enough, f"pages only count tokens; no KV cache: {BIDIRECTIONAL}")
    pool = _pool_bytes(settings, memory)
    pages = (pool.value - held) // page_bytes
    if pages < 1:
        raise ConfigError(f"not enough memory for one page of the KV cache: {pool.reason}")
    static_ratio = settings.cache.static_ratio
    if static_ratio is not None:
        if pool.value > memory.rest:
            raise ConfigError(
                f"cache.static_ratio = {static_ratio} (--mem-fraction-static): its pool of "
                f"{gib(pool.value)} exceeds the {gib(memory.rest)} left by weights and the largest "
                f"step; lower it: {memory}"
            )
        return ResolvedValue(pages, pool.reason)
    if enough < pages:
        return ResolvedValue(
            enough, f"enough for {settings.batching.running_max} requests of full context length"
        )
    return ResolvedValue(pages, pool.reason)


def _requested_pages(
    tokens_max: int, page_tokens: int, page_bytes: int, memory: MemoryBudget, held: int
) -> ResolvedValue[int]:
    """The configured size, which must fit as well: checked here, not while serving."""
    pages = tokens_max // page_tokens
    if pages < 1:
        raise ConfigError(
            f"cache.tokens_max = {tokens_max}: must be at least one page, {page_tokens} tokens"
        )
    if pages * page_bytes > memory.rest - held:
        raise ConfigError(
            f"cache.tokens_max = {tokens_max}: {gib(pages * page_bytes)} do not fit: {memory}"
        )
    return ResolvedValue(pages, f"cache.tokens_max = {tokens_max}")


def _pool_bytes(settings: Settings, memory: MemoryBudget) -> ResolvedValue[int]:
    """Bytes for the pool: a share of the remaining memory, or the rest of a share of all memory.

    The latter may exceed the available memory.
    """
    cache = settings.cache
    if cache.static_ratio is not None:
        share = int(memory.free * cache.static_ratio) - memory.weights
        reason = f"cache.static_ratio = {cache.static_ratio} of {memory}"
        return ResolvedValue(max(share, 0), reason)
    share = int(memory.rest * cache.memory_ratio)
    if share > cache.bytes_max:
        return ResolvedValue(cache.bytes_max, f"cache.bytes_max = {gib(cache.bytes_max)}; {memory}")
    return ResolvedValue(max(share, 0), f"cache.memory_ratio = {cache.memory_ratio} of {memory}")


def _pooling(settings: Settings, pooling: Pooling | None) -> ResolvedValue[Pooling | None]:
    if pooling is None:
        return ResolvedValue(None, "a generative model")
    if settings.model.embedding and pooling.task is Task.EMBED:
        return ResolvedValue(pooling, "model.embedding and the sentence-transformers files, if any")
    return ResolvedValue(pooling, f"the task of this architecture is {pooling.task}")


def _prefix(prefix: ResolvedValue[bool], pooling: Pooling | None) -> ResolvedValue[bool]:
    if prefix.value and pooling is not None and pooling.mode is not PoolMode.LAST:
        reason = f"{pooling.mode} pooling needs the vectors of all tokens, cached ones included"
        return ResolvedValue(value=False, reason=reason)
    return prefix


def _grammar(settings: Settings, card: ModelCard, pooling: Pooling | None) -> ResolvedValue[str]:
    if pooling is not None:
        return ResolvedValue("none", "nothing is generated")
    if not card.eos_ids:
        return ResolvedValue("none", "the model has no end-of-sequence token")
    return ResolvedValue(settings.grammar.backend, "grammar.backend")


def _overlap(settings: Settings, device: HostDevice) -> ResolvedValue[bool]:
    if not settings.batching.overlap:
        return ResolvedValue(value=False, reason="batching.overlap")
    if device.kind == "cpu":
        reason = "a CPU does not compute asynchronously"
        return ResolvedValue(value=False, reason=reason)
    return ResolvedValue(value=True, reason="batching.overlap")


def _running(
    settings: Settings,
    pages: int,
    step_tokens: int,
    states: ResolvedValue[int],
    *,
    overlap: bool,
) -> ResolvedValue[int]:
    """The running requests: each takes at least a page and its states, and a token per step."""
    each = OVERLAPPED if overlap else RUNNING
    if states.value and settings.batching.running_max > states.value // each:
        return ResolvedValue(
            min(pages, step_tokens, states.value // each), f"{each} states per request"
        )
    if settings.batching.running_max > step_tokens:
        return ResolvedValue(min(pages, step_tokens), "limited by the tokens of a step")
    if settings.batching.running_max > pages:
        return ResolvedValue(pages, "at least one page per request")
    return ResolvedValue(settings.batching.running_max, "batching.running_max")
