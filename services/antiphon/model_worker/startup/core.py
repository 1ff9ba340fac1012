"""Makes engine cores: their limits, the rules of their queues and what chooses drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from antiphon.config.worker import Policy, QueueConfig
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.state import EngineLimits
from antiphon.model_worker.batching.waiting_queue import QueueRules
from antiphon.model_worker.cache.events import BlockTracker
from antiphon.model_worker.cache.eviction import STRATEGIES
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.speculation.ngram import NgramDrafter
from antiphon.model_worker.speculation.policy import Speculation
from antiphon.model_worker.speculation.request_texts import RequestTexts
from antiphon.wire.namespaces import PageOrigin

if TYPE_CHECKING:
    from antiphon.config.settings import Settings
    from antiphon.config.speculation import SpeculationConfig
    from antiphon.model_worker.cache.pages import CachePools
    from antiphon.resolve.resolved_config import ResolvedConfig


class Sees(NamedTuple):
    """What the engine knows of a model that takes media: see `EngineLimits`."""

    width: int
    grids: bool = False
    span_tokens: int | None = None
    source: int | None = None
    """Tokens of a medium that is attended to beside the prompt."""
    source_heads: tuple[int, int] = (0, 0)
    """Layers that attend to it, and heads of each."""


def open_engine_core(
    settings: Settings,
    resolved: ResolvedConfig,
    pools: CachePools,
    vocab_size: int,
    kv_scales: str = "",
    first: EngineCore | None = None,
    *,
    sees: Sees | None = None,
) -> EngineCore:
    """Make an engine core without requests; `kv_scales` is a digest of the cache's scales.

    The attention groups after the `first` one have its drafter and its log of cached blocks. `sees`
    is what there is of a model that takes media.
    """
    cache = settings.cache
    tracker = BlockTracker() if cache.events else None
    if first is not None:
        tracker = first.index.tracker
    index = (
        RadixIndex(pools, STRATEGIES[cache.eviction], tracker) if resolved.prefix.value else None
    )
    return EngineCore(
        _limits(settings, resolved, pools, vocab_size, sees),
        pools,
        index=index,
        rules=_rules(settings.queue),
        origin=PageOrigin(
            model_digest=settings.cluster.model_digest,
            cluster_salt=settings.cluster.hash_salt,
            weight_version=settings.model.weight_version,
            config_overrides=settings.load.config_overrides,
            dtype=resolved.cache_dtype.value,
            quantization=resolved.linear.value,
            arithmetic=resolved.bits.value,
            kv_scales=kv_scales,
            layout=f"{_layout(resolved)}, {pools.page_tokens} tokens",  # antiphon/kernels/kv.py
        ),
        speculation=_speculation(settings, resolved, first),
    )


def _layout(resolved: ResolvedConfig) -> str:
    return "words, values beside keys" if resolved.device.value == "cpu" else "rows"


def _speculation(
    settings: Settings, resolved: ResolvedConfig, first: EngineCore | None
) -> Speculation | None:
    config = settings.speculation
    if config.algorithm == "none":
        return None
    if first is not None and first.speculation is not None:
        drafter = first.speculation.drafter
    elif config.algorithm == "ngram":
        drafter = RequestTexts(NgramDrafter(config))
    else:
        drafter = None  # the runner has a draft model
    return Speculation(drafter, drafts_max(config), resolved.running_max.value)


def drafts_max(config: SpeculationConfig) -> int:
    """Maximum number of draft tokens of a request in one step."""
    if config.draft_model and config.draft_steps is not None:
        return config.draft_steps
    return config.verify_tokens - 1


def _limits(
    settings: Settings,
    resolved: ResolvedConfig,
    pools: CachePools,
    vocab_size: int,
    sees: Sees | None,
) -> EngineLimits:
    batching, queue, pooling = settings.batching, settings.queue, resolved.pooling.value
    groups = resolved.attention_groups.value  # a step is shared by all
    running_max = max(1, resolved.running_max.value // groups)
    step_tokens = max(running_max, resolved.step_tokens.value // groups)
    chunk_tokens = min(resolved.chunk_tokens.value, step_tokens)
    alone_tokens = min(resolved.alone_tokens.value, step_tokens)
    return EngineLimits(
        step_tokens_max=step_tokens,
        chunk_tokens=None if resolved.whole_prompts.value else chunk_tokens,
        # A step is that of all groups, of which one does not see the requests of the others.
        alone_tokens=alone_tokens if groups == 1 else None,
        fill_tokens=min(resolved.fill_tokens.value, step_tokens),
        prefill_max=batching.prefill_max,
        mixed=resolved.mixed.value,
        running_max=running_max,
        queue_max=-(-queue.waiting_max // groups),
        context_tokens=min(resolved.context_tokens.value, pools.tokens_max),
        vocab_size=vocab_size,
        end_ids=frozenset(resolved.eos_ids.value),
        weights_digest=settings.cluster.model_digest,
        weight_version=settings.model.weight_version,
        stream_interval=batching.stream_interval,
        hidden_states=batching.hidden_states,
        pool_width=None if pooling is None else pooling.card.width,
        media_width=None if sees is None else sees.width,
        media_grids=sees is not None and sees.grids,
        span_tokens=None if sees is None else sees.span_tokens,
        source_shape=None if sees is None or sees.source is None else (sees.source, sees.width),
        source_heads=(0, 0) if sees is None else sees.source_heads,
        flights=resolved.stages.value,
        queue_timeout_s=queue.timeout_s,
        running_timeout_s=batching.running_timeout_s,
        checkpoint_tokens=settings.cache.checkpoint_tokens,
        follow_timeout_s=settings.grammar.follow_timeout_s,
        conservativeness=batching.conservativeness,
    )


def _rules(queue: QueueConfig) -> QueueRules:
    # The policy `priority` orders by arrival within one priority.
    policy = Policy.FCFS if queue.policy is Policy.PRIORITY else queue.policy
    rules = QueueRules.from_config(queue)
    return msgspec.structs.replace(rules, policy=policy, refuse_priority=queue.refuse_priority)
