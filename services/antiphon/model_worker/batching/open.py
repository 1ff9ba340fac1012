"""From settings to the batching of a worker: its limits, its rules and its prefix index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.worker import Policy, QueueConfig
from antiphon.model_worker.batching.admission import Limits
from antiphon.model_worker.batching.batching import Batching
from antiphon.model_worker.batching.policy import Rules
from antiphon.model_worker.batching.walking import WalkThreads
from antiphon.model_worker.cache.events import Blocks
from antiphon.model_worker.cache.eviction import STRATEGIES
from antiphon.model_worker.cache.hashing import Namespace
from antiphon.model_worker.cache.radix import RadixIndex

if TYPE_CHECKING:
    from antiphon.config.resolve import Plan as Resolved
    from antiphon.config.settings import Settings
    from antiphon.model_worker.cache.table import CachePools


def open_batching(
    settings: Settings,
    resolved: Resolved,
    pools: CachePools,
    *,
    vocab_size: int,
    weights_digest: str,
    kv_scales: str = "",
) -> Batching:
    """Make an empty one.

    Args:
        settings: What the operator said of queue and steps.
        resolved: What was decided of the rest.
        pools: The pages of the model that was loaded.
        vocab_size: Token ids that it has.
        weights_digest: Names its weights.
        kv_scales: Names the scales of its keys and values, where those are in eight bits.
    """
    cache = settings.cache
    told = Blocks() if cache.events else None
    found = RadixIndex(pools, STRATEGIES[cache.eviction], told) if resolved.prefix.value else None
    return Batching(
        limits_of(settings, resolved, pools, vocab_size, weights_digest),
        pools,
        index=found,
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
        walker=WalkThreads(),
    )


def limits_of(
    settings: Settings,
    resolved: Resolved,
    pools: CachePools,
    vocab_size: int,
    weights_digest: str,
) -> Limits:
    """What one step and one request can take."""
    batching, queue, pooling = settings.batching, settings.queue, resolved.pooling.value
    return Limits(
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


def rules_of(queue: QueueConfig) -> Rules:
    """Who goes first. The policy `priority` is arrival among equals of one priority."""
    return Rules(
        policy=Policy.FCFS if queue.policy is Policy.PRIORITY else queue.policy,
        priority=queue.by_priority,
        low_first=queue.low_first,
        preempt_threshold=queue.preempt_threshold,
        refuse_priority=queue.refuse_priority,
        max_overtake_s=queue.max_overtake_s,
    )
