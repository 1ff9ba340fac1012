"""What a worker's memory holds: weights, pages of the KV cache, and recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype, LinearFormat
from antiphon.config.quantization import GPU_KERNELS, QuantizationConfig, choose_quantization
from antiphon.model_card.card import item_bytes
from antiphon.model_card.memory import (
    MemoryBudget,
    activation_bytes,
    gib,
    logits_bytes,
    prompt_logits_bytes,
    weight_bytes,
)
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.config.settings import Settings
    from antiphon.model_card.card import ModelCard

BIDIRECTIONAL = "attention is bidirectional"
RUNNING = 2
"""States of a running request: the one that its next step reads, and the one that it writes."""
OVERLAPPED = 4
"""The same with overlapped steps, where a step is launched before the result of the one before is
read: one more state, and one that a launched plan may still read after it was freed."""


class WeightStorage(msgspec.Struct, frozen=True):
    quantization: ResolvedValue[str]
    """Quantization of the checkpoint, or at load time."""
    quantized: ResolvedValue[LinearFormat]
    """Format of quantized linear layers; others have the plan's `linear` format."""
    bytes: ResolvedValue[int]
    """Size of all weights."""

    @property
    def numerics(self) -> Mapping[str, str]:
        if self.quantization.value in ("none", "gguf"):
            return {}
        return {"quantized": f"{self.quantization.value} as {self.quantized.value}"}


def resolve_weight_storage(
    settings: Settings, card: ModelCard, dtype: Dtype, linear: ResolvedValue[LinearFormat]
) -> WeightStorage:
    """Resolve the format of quantized linear layers: int8 where that is exact."""
    quantization = choose_quantization(
        card.quantization, settings.model.quantization, gguf=card.gguf
    )
    count = _count(card, quantization)
    quantized = _quantized(settings, quantization, linear, dtype, count)
    taken = weight_bytes(card, dtype, linear.value, quantized=quantized.value, count=count)
    of = f", {count} of them quantized" if count else ""
    return WeightStorage(
        _quantization(settings, card, quantization),
        quantized,
        ResolvedValue(taken, f"{card.weights.count} parameters{of}"),
    )


def _quantization(
    settings: Settings, card: ModelCard, quantization: QuantizationConfig | None
) -> ResolvedValue[str]:
    said = settings.model.quantization
    if quantization is None:
        if card.gguf:
            return ResolvedValue("gguf", "each tensor of the file has its own type")
        return ResolvedValue("none", "the checkpoint is not quantized")
    name = str(quantization.method)
    if said in GPU_KERNELS:
        return ResolvedValue(name, f"{said} is a GPU kernel; the weights are in {name} format")
    if quantization.online:
        return ResolvedValue(name, "model.quantization: weights are quantized while loading")
    return ResolvedValue(name, "config.json" if card.quantization else "model.quantization")


def _count(card: ModelCard, quantization: QuantizationConfig | None) -> int:
    if quantization is None or not quantization.online:
        return card.weights.quantized
    tables = (1 if card.tied else 2) * card.vocabulary_size * card.hidden_size
    return max(card.weights.count - tables, 0)


def _quantized(
    settings: Settings,
    quantization: QuantizationConfig | None,
    linear: ResolvedValue[LinearFormat],
    dtype: Dtype,
    count: int,
) -> ResolvedValue[LinearFormat]:
    if quantization is None:
        return ResolvedValue(linear.value, "model.linear")
    if settings.model.linear is not LinearFormat.AUTO or linear.value is LinearFormat.PLAIN:
        return ResolvedValue(linear.value, linear.reason)
    if quantization.int8_exact and quantization.dynamic_activations:
        reason = "int8 as stored; activations are quantized to int8, as the checkpoint specifies"
        return ResolvedValue(LinearFormat.INT8_DYNAMIC, reason)
    if quantization.int8_exact:
        return ResolvedValue(LinearFormat.INT8, "int8 as stored; activations are not quantized")
    taken, rounded = gib(count * item_bytes(dtype)), gib(count)
    return ResolvedValue(
        linear.value,
        f"converted to {dtype} while loading, {taken}; model.linear = int8 would take {rounded}",
    )


def memory_budget(
    settings: Settings,
    card: ModelCard,
    free: int,
    dtype: Dtype,
    weights: int,
    step_tokens: int,
) -> MemoryBudget:
    memory = MemoryBudget(
        free=free,
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


def state_count(
    settings: Settings, state_bytes: int, memory: MemoryBudget, pool: ResolvedValue[int]
) -> ResolvedValue[int]:
    """Divide the pool between pages and states; a state of 0 bytes means that there are none."""
    if not state_bytes:
        return ResolvedValue(0, "the model has no recurrent layers")
    cache = settings.cache
    if cache.checkpoint_tokens % settings.cluster.page_tokens:
        raise ConfigError(
            f"cache.checkpoint_tokens = {cache.checkpoint_tokens}: must be a multiple of"
            f" cluster.page_tokens = {settings.cluster.page_tokens}"
        )
    if cache.states_max is not None:
        if cache.states_max < RUNNING or cache.states_max * state_bytes > memory.rest:
            raise ConfigError(
                f"cache.states_max = {cache.states_max}: a request needs {RUNNING} states of"
                f" {gib(state_bytes)}: {memory}"
            )
        return ResolvedValue(cache.states_max, f"cache.states_max = {cache.states_max}")
    count = int(pool.value * cache.states_ratio / (1 + cache.states_ratio)) // state_bytes
    if count < RUNNING:
        raise ConfigError(
            f"not enough memory for the {RUNNING} states of one request: {pool.reason}"
        )
    return ResolvedValue(count, f"cache.states_ratio = {cache.states_ratio} of {pool.reason}")


def cache_pages(
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
    pool = pool_bytes(settings, memory)
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


def pool_bytes(settings: Settings, memory: MemoryBudget) -> ResolvedValue[int]:
    """Bytes for the pool: a share of the remaining memory, or the rest of a share of all of it."""
    cache = settings.cache
    if cache.static_ratio is not None:
        share = int(memory.free * cache.static_ratio) - memory.weights
        reason = f"cache.static_ratio = {cache.static_ratio} of {memory}"
        return ResolvedValue(max(share, 0), reason)
    share = int(memory.rest * cache.memory_ratio)
    if share > cache.bytes_max:
        return ResolvedValue(cache.bytes_max, f"cache.bytes_max = {gib(cache.bytes_max)}; {memory}")
    return ResolvedValue(max(share, 0), f"cache.memory_ratio = {cache.memory_ratio} of {memory}")
