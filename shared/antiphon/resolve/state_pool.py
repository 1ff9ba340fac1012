"""Sizes the pool of recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError
from antiphon.model_card.memory import gib
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from antiphon.config.settings import Settings
    from antiphon.model_card.memory import MemoryBudget

RUNNING = 2
"""States of a running request: the one that its next step reads, and the one that it writes."""
OVERLAPPED = 4
"""The same with overlapped steps, where a step is launched before the result of the one before is
read: one more state, and one that a launched plan may still read after it was freed."""


def state_count(
    settings: Settings, state_bytes: int, memory: MemoryBudget, pool: ResolvedValue[int]
) -> ResolvedValue[int]:
    """Divide the pool between pages and states, those of running requests and checkpoints.

    Args:
        settings: The settings.
        state_bytes: Bytes of one state, in all layers; 0: the model has none.
        memory: The memory budget.
        pool: Bytes that pages and states share.

    Raises:
        ConfigError: There is too little memory for a single request, or the configured count does
            not fit.
    """
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
