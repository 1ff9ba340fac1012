"""From what the operator said to what we do: every decision, with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from antiphon.config.card import ModelCard, item_bytes
from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.config.device import Device
    from antiphon.config.settings import Settings

T = TypeVar("T")


class Decided(msgspec.Struct, Generic[T], frozen=True):
    """A value and why it is this one."""

    value: T
    reason: str


class Plan(msgspec.Struct, frozen=True):
    """What the worker does. Nothing here is `auto` or unset."""

    device: Decided[str]
    dtype: Decided[Dtype]
    threads: Decided[int]
    context_tokens: Decided[int]
    eos_ids: Decided[tuple[int, ...]]
    page_tokens: Decided[int]
    cache_pages: Decided[int]
    cache_bytes: Decided[int]
    step_tokens: Decided[int]
    chunk_tokens: Decided[int]
    running_max: Decided[int]

    @property
    def cache_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.cache_pages.value * self.page_tokens.value


def resolve(settings: Settings, card: ModelCard, device: Device) -> Plan:
    """Decide everything that the operator left open. Pure; `device` was read before loading.

    Raises:
        ConfigError: The model was not made for this context, or memory holds not one page.
    """
    batching = settings.batching
    dtype = _dtype(settings, card)
    context = _context(settings, card)
    page_tokens = settings.cluster.page_tokens
    pages = _pages(settings, card, device, dtype.value, context.value)
    return Plan(
        device=_device(settings, device),
        dtype=dtype,
        threads=_threads(settings, device),
        context_tokens=_fit(context, pages.value * page_tokens),
        eos_ids=Decided(card.eos_ids, "config.json and generation_config.json"),
        page_tokens=Decided(page_tokens, "cluster.page_tokens"),
        cache_pages=pages,
        cache_bytes=Decided(
            pages.value * page_tokens * card.kv_bytes(dtype.value),
            f"{card.kv_bytes(dtype.value)} bytes a token",
        ),
        step_tokens=Decided(batching.tokens_max, "batching.tokens_max"),
        chunk_tokens=_chunk(settings),
        running_max=_running(settings, pages.value),
    )


def table(plan: Plan) -> str:
    """The plan as aligned lines: value and reason of each decision."""
    rows = list(_rows(plan))
    names = max(len(name) for name, _, _ in rows)
    values = max(len(value) for _, value, _ in rows)
    return "\n".join(
        f"{name:<{names}}  {value:>{values}}  {reason}" for name, value, reason in rows
    )


def _rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    for name in plan.__struct_fields__:
        decided: Decided[object] = getattr(plan, name)
        value = decided.value
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        yield name, shown or "none", decided.reason


def _device(settings: Settings, device: Device) -> Decided[str]:
    if settings.model.device == "auto":
        return Decided(device.kind, "what this machine has")
    return Decided(settings.model.device, "model.device")


def _dtype(settings: Settings, card: ModelCard) -> Decided[Dtype]:
    if settings.model.dtype is Dtype.AUTO:
        return Decided(card.dtype, "the checkpoint's")
    return Decided(settings.model.dtype, "model.dtype")


def _threads(settings: Settings, device: Device) -> Decided[int]:
    if settings.model.threads is None:
        # OpenMP spins at barriers: beside busy neighbours, as many threads as there are cores run
        # up to 60 times slower than one fewer.
        threads = max(1, device.cores - 1)
        return Decided(threads, f"one fewer than the {device.cores} cores, for the other services")
    return Decided(settings.model.threads, "model.threads")


def _context(settings: Settings, card: ModelCard) -> Decided[int]:
    said = settings.model.context_tokens
    if said is None:
        return Decided(card.context_tokens, "max_position_embeddings of the model")
    if said > card.context_tokens:
        raise ConfigError(
            f"model.context_tokens = {said}: the model was made for {card.context_tokens}"
        )
    return Decided(said, "model.context_tokens")


def _fit(context: Decided[int], cache_tokens: int) -> Decided[int]:
    if context.value <= cache_tokens:
        return context
    return Decided(cache_tokens, f"the pool holds no more of {context.value} ({context.reason})")


def _pages(
    settings: Settings, card: ModelCard, device: Device, dtype: Dtype, context_tokens: int
) -> Decided[int]:
    page_tokens = settings.cluster.page_tokens
    if settings.cache.tokens_max is not None:
        pages = settings.cache.tokens_max // page_tokens
        if pages < 1:
            raise ConfigError(
                f"cache.tokens_max = {settings.cache.tokens_max}: one page has {page_tokens} tokens"
            )
        return Decided(pages, f"cache.tokens_max = {settings.cache.tokens_max}")
    pool = _pool_bytes(settings, card, device, dtype)
    pages = pool.value // (page_tokens * card.kv_bytes(dtype))
    if pages < 1:
        raise ConfigError(f"no memory for one page of the cache: {pool.reason}")
    enough = settings.batching.running_max * -(-context_tokens // page_tokens)
    if enough < pages:
        return Decided(enough, f"{settings.batching.running_max} requests of full context")
    return Decided(pages, pool.reason)


def _pool_bytes(settings: Settings, card: ModelCard, device: Device, dtype: Dtype) -> Decided[int]:
    """Bytes for the pool: a share of what the weights leave, or the rest of a share of all."""
    cache = settings.cache
    weights = card.weights.count * item_bytes(dtype)
    free = f"{_gib(device.memory_bytes)} free, {_gib(weights)} of weights"
    if cache.static_ratio is not None:
        rest = int(device.memory_bytes * cache.static_ratio) - weights
        return Decided(max(rest, 0), f"cache.static_ratio = {cache.static_ratio} of {free}")
    share = int((device.memory_bytes - weights) * cache.memory_ratio)
    if share > cache.bytes_max:
        return Decided(cache.bytes_max, f"cache.bytes_max = {_gib(cache.bytes_max)}; {free}")
    return Decided(max(share, 0), f"cache.memory_ratio = {cache.memory_ratio} of {free}")


def _chunk(settings: Settings) -> Decided[int]:
    if settings.batching.chunk_tokens is None:
        return Decided(settings.batching.tokens_max, "as long as a step")
    return Decided(settings.batching.chunk_tokens, "batching.chunk_tokens")


def _running(settings: Settings, pages: int) -> Decided[int]:
    """A running request holds at least a page."""
    if settings.batching.running_max > pages:
        return Decided(pages, "one page each")
    return Decided(settings.batching.running_max, "batching.running_max")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.2f} GiB"
