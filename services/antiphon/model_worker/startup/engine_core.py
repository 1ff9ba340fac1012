"""Makes the engine core from the settings: its limits, queue rules and prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.worker import Policy, QueueConfig
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.queue import QueueRules
from antiphon.model_worker.batching.state import EngineLimits
from antiphon.model_worker.cache.events import BlockTracker
from antiphon.model_worker.cache.eviction import STRATEGIES
from antiphon.model_worker.cache.hashing import Namespace
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.grammar.executor import ThreadedMatcherExecutor

if TYPE_CHECKING:
    from antiphon.config.settings import Settings
    from antiphon.model_worker.cache.table import CachePools
    from antiphon.resolve.resolved_config import ResolvedConfig as Resolved


def open_engine_core(
    settings: Settings,
    resolved: Resolved,
    pools: CachePools,
    *,
    vocab_size: int,
    weights_digest: str,
    kv_scales: str = "",
) -> EngineCore:
    """Make an engine core without requests.

    Args:
        settings: The operator's settings of queue and batching.
        resolved: The resolved configuration.
        pools: The page pools of the loaded model.
        vocab_size: Vocabulary size of the model.
        weights_digest: Digest of the weights.
        kv_scales: Digest of the scales of an 8-bit KV cache.
    """
    cache = settings.cache
    tracker = BlockTracker() if cache.events else None
    index = (
        RadixIndex(pools, STRATEGIES[cache.eviction], tracker) if resolved.prefix.value else None
    )
    return EngineCore(
        limits_of(settings, resolved, pools, vocab_size, weights_digest),
        pools,
        index=index,
        rules=rules_of(settings.queue),
        namespace=Namespace(
            model_digest=weights_digest,
            salt=settings.cluster.hash_salt,
            weight_version=settings.model.weight_version,
            dtype=resolved.cache_dtype.value,
            quantization=resolved.linear.value,
            arithmetic=resolved.bits.value,
            kv_scales=kv_scales,
        ),
        matcher_executor=ThreadedMatcherExecutor(),
    )


def limits_of(
    settings: Settings,
    resolved: Resolved,
    pools: CachePools,
    vocab_size: int,
    weights_digest: str,
) -> EngineLimits:
    """The limits of a step and of a request, from the settings."""
    batching, queue, pooling = settings.batching, settings.queue, resolved.pooling.value
    return EngineLimits(
        step_tokens_max=resolved.step_tokens.value,
        chunk_tokens=None if resolved.whole_prompts.value else resolved.chunk_tokens.value,
        fill_tokens=resolved.fill_tokens.value,
        prefill_max=batching.prefill_max,
        mixed=resolved.mixed.value,
        running_max=resolved.running_max.value,
        queue_max=queue.waiting_max,
        context_tokens=min(resolved.context_tokens.value, pools.tokens_max),
        vocab_size=vocab_size,
        end_ids=frozenset(resolved.eos_ids.value),
        weights_digest=weights_digest,
        weight_version=settings.model.weight_version,
        stream_interval=batching.stream_interval,
        hidden_states=batching.hidden_states,
        pool_width=None if pooling is None else pooling.width,
        queue_timeout_s=queue.timeout_s,
        running_timeout_s=batching.running_timeout_s,
        checkpoint_tokens=settings.cache.checkpoint_tokens,
        follow_timeout_s=settings.grammar.follow_timeout_s,
        conservativeness=batching.conservativeness,
    )


def rules_of(queue: QueueConfig) -> QueueRules:
    """The queue rules. The policy `priority` orders by arrival within one priority."""
    return QueueRules(
        policy=Policy.FCFS if queue.policy is Policy.PRIORITY else queue.policy,
        priority=queue.by_priority,
        low_first=queue.low_first,
        preempt_threshold=queue.preempt_threshold,
        refuse_priority=queue.refuse_priority,
        max_overtake_s=queue.max_overtake_s,
    )
