"""Resolves settings and model card to the worker's plan: each decision has its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.model import CacheDtype, Dtype, LinearFormat
from antiphon.model_card.config_json import Task
from antiphon.model_card.files import gib
from antiphon.model_card.pooling import Pooling, PoolMode
from antiphon.model_card.served_model import draft_settings
from antiphon.resolve.draft import (
    NO_DRAFT,
    ResolvedDraft,
    check_draft,
    check_draft_context,
    naming_draft,
)
from antiphon.resolve.graphs import NO_GRAPHS, resolve_decode_graphs, resolve_prefill_graphs
from antiphon.resolve.memory import (
    BIDIRECTIONAL,
    NO_PLANS,
    activation_bytes,
    cache_pages,
    cross_requests,
    media_bytes,
    memory_budget,
    page_bytes,
    page_tokens_of,
    plan_bytes,
    pool_bytes,
    resolve_weight_storage,
    state_count,
)
from antiphon.resolve.numerics import (
    ANY_BACKENDS,
    numerics_digest,
    resolve_backends,
    resolve_cache_dtype,
    resolve_cache_scales,
    resolve_deterministic,
    resolve_dtype,
    resolve_linear,
)
from antiphon.resolve.ranks import (
    CUT_EXPERTS,
    ONE_GROUP,
    ONE_RANK,
    ONE_STAGE,
    group_settings,
    over_groups,
    rank_device,
    resolve_expert_ranks,
    resolve_ranks,
    resolve_stages,
    stage_share,
)
from antiphon.resolve.resolved_value import ResolvedValue
from antiphon.resolve.steps import (
    fit_context,
    resolve_alone_tokens,
    resolve_chunk_tokens,
    resolve_context,
    resolve_fill_tokens,
    resolve_mixed,
    resolve_overlap,
    resolve_running_max,
    resolve_step_tokens,
    resolve_whole_prompts,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.config.settings import Settings
    from antiphon.model_card.card import ModelCard
    from antiphon.resolve.device import HostDevice
    from antiphon.resolve.draft import DraftCard

_VALUE_WIDTH = 16
"""A longer value shifts only its own reason."""
CACHED_BYTES_MAX = 64 << 20
"""Weights up to this size are read from CPU caches: steps are short, and services need a core."""
UNLOADED = ResolvedValue("", "known once the model is loaded")


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
    media_bytes: ResolvedValue[int]
    cache_pages: ResolvedValue[int]
    cache_bytes: ResolvedValue[int]
    cache_states: ResolvedValue[int]
    state_bytes: ResolvedValue[int]
    step_tokens: ResolvedValue[int]
    whole_prompts: ResolvedValue[bool]
    chunk_tokens: ResolvedValue[int]
    alone_tokens: ResolvedValue[int]
    fill_tokens: ResolvedValue[int]
    mixed: ResolvedValue[bool]
    prefix: ResolvedValue[bool]
    running_max: ResolvedValue[int]
    overlap: ResolvedValue[bool]
    grammar: ResolvedValue[str]
    ranks: ResolvedValue[int] = ONE_RANK
    ep_ranks: ResolvedValue[int] = CUT_EXPERTS
    stages: ResolvedValue[int] = ONE_STAGE
    attention_groups: ResolvedValue[int] = ONE_GROUP
    decoder: ResolvedValue[str] = UNLOADED
    graph_sizes: ResolvedValue[tuple[int, ...]] = NO_GRAPHS
    prefill_graph_sizes: ResolvedValue[tuple[int, ...]] = NO_GRAPHS
    draft: ResolvedValue[ResolvedDraft | None] = NO_DRAFT
    plan_bytes: ResolvedValue[int] = NO_PLANS
    backends: ResolvedValue[tuple[str, ...]] = ANY_BACKENDS

    @property
    def forced(self) -> dict[str, str]:
        """The backend of each operation for which the settings name one."""
        return dict(each.split(":") for each in self.backends.value)

    @property
    def cache_tokens(self) -> int:
        return self.cache_pages.value * self.page_tokens.value

    def of_draft(self) -> ResolvedConfig:
        """The plan by which the draft model is loaded, which there must be."""
        draft = self.draft.value
        assert draft is not None, "speculative decoding has a draft model"
        unscaled = ResolvedValue("", "cache.scales are those of the served model")
        return msgspec.structs.replace(
            self,
            dtype=draft.dtype,
            quantization=draft.quantization,
            linear=draft.linear,
            quantized=draft.quantized,
            implementation=draft.implementation,
            cache_dtype=draft.cache_dtype,
            cache_scales=unscaled,
            weight_bytes=draft.weight_bytes,
            ep_ranks=CUT_EXPERTS,
            draft=NO_DRAFT,
        )


def resolve(
    settings: Settings,
    card: ModelCard,
    device: HostDevice,
    pooling: Pooling | None = None,
    implementation: ResolvedValue[str] | None = None,
    draft: DraftCard | None = None,
    *,
    sees: bool = False,
) -> ResolvedConfig:
    """Decide everything that the settings leave open. Pure; `device` was read before loading.

    `pooling` is None for a generative model; `implementation` None leaves it to the settings;
    `draft` is the draft model of speculative decoding, if the settings name one; a model that
    `sees` takes media. Numbers of threads, bytes and pages are those of one rank.
    """
    if card.task is Task.DRAFT:
        raise ConfigError(
            f"model.path: {card.architecture} is a draft head, which only drafts for another "
            "model: set it as speculation.draft_model (--speculative-draft-model-path)"
        )
    ranks, stages = resolve_ranks(settings, pooling, device), settings.parallel.pp_size
    layers = implementation or ResolvedValue(settings.model.implementation, "model.implementation")
    if layers.value == "transformers":
        card = card.with_full_heads()
    if device.kind != "cpu":
        _check_gpu(settings, layers.value)
    if card.source_tokens:
        _check_cross(settings)
    if stages > 1:
        _check_stages(card)
    backends = resolve_backends(settings.model)
    free, device = device.memory_bytes, rank_device(settings, device)
    dtype = resolve_dtype(settings, card, device)
    linear = resolve_linear(settings, device, dtype.value)
    cache_dtype = resolve_cache_dtype(settings, card, device, dtype.value)
    kept = resolve_weight_storage(settings, card, dtype.value, linear, device)
    groups, of_group = settings.parallel.attn_dp_size, group_settings(settings)
    kept = kept.over(settings.parallel.ranks, groups, card.attention_share)
    context = resolve_context(settings, card)
    page_tokens = page_tokens_of(settings)
    whole = resolve_whole_prompts(settings, card)
    step = resolve_step_tokens(settings, context.value, whole=whole.value)
    drawing = min(settings.batching.running_max, step.value)
    beside = _draft(settings, card, device, draft, step.value)
    captured = resolve_decode_graphs(settings, device, pooling, settings.batching.running_max)
    plans = plan_bytes(card, device, backends.value, len(captured.value))
    memory = memory_budget(
        settings,
        card,
        device.memory_bytes,
        dtype.value,
        kept.bytes.value,
        step.value,
        beside.value,
        plans=plans.value,
        gpu=device.kind == "cuda",
    )
    media = media_bytes(settings, memory, sees=sees)
    if not memory.gpu:
        memory = msgspec.structs.replace(memory, media=media.value)
    state_bytes = stage_share(card.state_bytes(dtype.value, ranks.value // groups), card, stages)
    states = state_count(of_group, state_bytes, memory, pool_bytes(settings, memory))
    cross_bytes = card.cross_bytes(cache_dtype.value, page_tokens.value)
    crossing = cross_requests(settings, cross_bytes, pool_bytes(settings, memory))
    held = states.value * state_bytes
    token_bytes = stage_share(card.kv_bytes(cache_dtype.value, ranks.value // groups), card, stages)
    each = f"{token_bytes} bytes per token"
    if beside.value is not None:
        each += f", and {beside.value.token_bytes.value} of the draft model"
        token_bytes += beside.value.token_bytes.value
    pages = cache_pages(
        of_group, memory, token_bytes, context.value, held + crossing.value * cross_bytes
    )
    cache_bytes = pages.value * page_bytes(page_tokens.value, token_bytes)
    overlap = resolve_overlap(settings, device, pooling)
    running = over_groups(
        groups,
        resolve_running_max(
            of_group,
            pages.value,
            step.value // groups,
            states,
            overlap=overlap.value or stages > 1,
        ),
    )
    if 0 < crossing.value < running.value:
        running = crossing
    served = fit_context(context, pages.value * page_tokens.value)
    chunk = resolve_chunk_tokens(settings, device, dtype.value, context.value, whole=whole.value)
    if draft is not None:
        check_draft_context(settings, draft.card, served.value)
    return ResolvedConfig(
        device=_device(settings, device),
        dtype=dtype,
        quantization=kept.quantization,
        linear=linear,
        quantized=kept.quantized,
        deterministic=resolve_deterministic(settings, linear, card),
        bits=numerics_digest(
            device,
            card,
            dtype.value,
            linear.value,
            kept,
            cache_dtype.value,
            settings.parallel,
            backends.value,
        ),
        implementation=layers,
        pooling=_pooling(settings, pooling),
        threads=_threads(settings, device, linear.value, memory.weights),
        context_tokens=served,
        eos_ids=ResolvedValue(
            card.eos_ids, "config.json, generation_config.json and the tokenizer"
        ),
        page_tokens=page_tokens,
        cache_dtype=cache_dtype,
        cache_scales=resolve_cache_scales(settings, cache_dtype.value),
        memory_bytes=_free(settings, device, free),
        weight_bytes=kept.bytes,
        activation_bytes=ResolvedValue(memory.activations, f"{step.value} tokens per step"),
        logit_bytes=ResolvedValue(memory.logits, f"{drawing} rows of logits"),
        scored_bytes=ResolvedValue(memory.scored, "prompt logprobs, computed in chunks"),
        media_bytes=media,
        cache_pages=pages,
        cache_bytes=ResolvedValue(cache_bytes, each),
        cache_states=states,
        state_bytes=ResolvedValue(held, f"{state_bytes} bytes per state"),
        step_tokens=step,
        whole_prompts=whole,
        chunk_tokens=chunk,
        alone_tokens=resolve_alone_tokens(settings, device, dtype.value, chunk, step.value),
        fill_tokens=resolve_fill_tokens(settings, device, dtype.value, step.value, pooling),
        mixed=resolve_mixed(settings),
        prefix=_prefix(settings, card, pooling),
        running_max=running,
        overlap=overlap,
        grammar=_grammar(settings, card, pooling),
        ranks=ranks,
        ep_ranks=resolve_expert_ranks(settings, device),
        stages=resolve_stages(settings, device),
        attention_groups=ResolvedValue(groups, "parallel.attn_dp_size"),
        draft=beside,
        plan_bytes=plans,
        graph_sizes=resolve_decode_graphs(settings, device, pooling, running.value),
        prefill_graph_sizes=resolve_prefill_graphs(settings, device, step.value),
        backends=backends,
    )


def table(plan: ResolvedConfig) -> str:
    rows = list(_rows(plan))
    names = max(len(name) for name, _, _ in rows)
    values = max(len(value) for _, value, _ in rows if len(value) <= _VALUE_WIDTH)
    lines = (f"{name:<{names}}  {value:>{values}}  {reason}" for name, value, reason in rows)
    return "\n".join(lines)


def _rows(plan: ResolvedConfig | ResolvedDraft, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name in plan.__struct_fields__:
        decided: ResolvedValue[object] = getattr(plan, name)
        value = decided.value
        if isinstance(value, ResolvedDraft):
            yield from _rows(value, f"{name}_")
            continue
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        yield f"{prefix}{name}", shown or "none", decided.reason


def _check_gpu(settings: Settings, implementation: str) -> None:
    """Refuse what only runs on the CPU, by the name of its setting."""
    if implementation == "transformers":
        said = f"model.device = {settings.model.device}"
        raise ConfigError(f"{said}: model.implementation = transformers runs on cpu only")


def _check_cross(settings: Settings) -> None:
    """Refuse what cross attention does not run on, by the name of its setting."""
    refused = {
        "model.device": settings.model.device not in ("auto", "cpu"),
        "parallel.tp_size": settings.parallel.tp_size > 1,
        "parallel.pp_size": settings.parallel.pp_size > 1,
    }
    for name, asked in refused.items():
        if asked:
            raise ConfigError(f"{name}: a model with cross attention runs on one rank, on the CPU")


def _check_stages(card: ModelCard) -> None:
    """Refuse layers that read, beside the residual stream, what another stage would have."""
    if card.per_layer_width or any(each.kv_layer is not None for each in card.layer_heads):
        raise ConfigError(
            "parallel.pp_size: a model with per-layer embeddings, or whose layers share keys and "
            "values, has one stage; use parallel.tp_size (--tp-size)"
        )


def _draft(
    settings: Settings,
    card: ModelCard,
    device: HostDevice,
    draft: DraftCard | None,
    step_tokens: int,
) -> ResolvedValue[ResolvedDraft | None]:
    """The plan for the draft model, by the settings for the served one where it has none.

    Ranks divide it as they divide the served model.
    """
    own = draft_settings(settings)
    if own is None or draft is None:
        return NO_DRAFT
    check_draft(settings, card, draft.card)
    with naming_draft(own.model.path):
        dtype = resolve_dtype(own, draft.card, device)
        linear = resolve_linear(own, device, dtype.value)
        cache_dtype = resolve_cache_dtype(own, draft.card, device, dtype.value)
        kept = resolve_weight_storage(own, draft.card, dtype.value, linear, device)
        kept = kept.over(settings.parallel.ranks)
    active = activation_bytes(draft.card, dtype.value, step_tokens)
    token_bytes = draft.card.kv_bytes(cache_dtype.value, settings.parallel.ranks)
    return ResolvedValue(
        ResolvedDraft(
            model=ResolvedValue(own.model.path, "speculation.draft_model"),
            dtype=dtype,
            quantization=kept.quantization,
            linear=linear,
            quantized=kept.quantized,
            implementation=draft.implementation,
            cache_dtype=cache_dtype,
            weight_bytes=kept.bytes,
            activation_bytes=ResolvedValue(active, f"{step_tokens} tokens per step"),
            token_bytes=ResolvedValue(token_bytes, "in the KV cache, beside the served model's"),
        ),
        "speculation.draft_model",
    )


def _free(settings: Settings, device: HostDevice, free: int) -> ResolvedValue[int]:
    used = device.memory_bytes
    if used == settings.model.memory_bytes:
        return ResolvedValue(used, f"model.memory_bytes, of {gib(free)} free")
    if device.kind == "cuda":
        return ResolvedValue(used, f"free memory of {settings.model.device}")
    return ResolvedValue(used, "free memory, within container limits")


def _device(settings: Settings, device: HostDevice) -> ResolvedValue[str]:
    if settings.model.device == "auto":
        return ResolvedValue("cpu", "the device of this machine")
    return ResolvedValue(settings.model.device, "model.device")


def _threads(
    settings: Settings, device: HostDevice, linear: LinearFormat, weights_bytes: int
) -> ResolvedValue[int]:
    if settings.model.threads is not None:
        return ResolvedValue(settings.model.threads, "model.threads")
    if (local := len(settings.parallel.local_ranks)) > 1:
        return ResolvedValue(device.cores, f"the cores of each of {local} ranks")
    if linear is not LinearFormat.PLAIN and weights_bytes >= CACHED_BYTES_MAX:
        return ResolvedValue(device.cores, "all cores: kernel threads do not wait for each other")
    # torch's threads spin at every barrier: next to other busy processes, as many threads as cores
    # run up to 60 times slower than one fewer.
    spin, short = "torch threads spin while waiting", "steps of this model are short"
    why = spin if linear is LinearFormat.PLAIN else short
    reason = f"one fewer than the {device.cores} cores: {why}"
    return ResolvedValue(max(1, device.cores - 1), reason)


def _pooling(settings: Settings, pooling: Pooling | None) -> ResolvedValue[Pooling | None]:
    if pooling is None:
        return ResolvedValue(None, "a generative model")
    if settings.model.embedding and pooling.task is Task.EMBED:
        return ResolvedValue(pooling, "model.embedding and the sentence-transformers files, if any")
    return ResolvedValue(pooling, f"the task of this architecture is {pooling.task}")


def _prefix(settings: Settings, card: ModelCard, pooling: Pooling | None) -> ResolvedValue[bool]:
    if not card.causal:
        reason = f"{BIDIRECTIONAL}: states of a prefix depend on the text after it"
        return ResolvedValue(value=False, reason=reason)
    if settings.cache.prefix and pooling is not None and pooling.mode is not PoolMode.LAST:
        reason = f"{pooling.mode} pooling needs the vectors of all tokens, cached ones included"
        return ResolvedValue(value=False, reason=reason)
    return ResolvedValue(settings.cache.prefix, "cache.prefix")


def _grammar(settings: Settings, card: ModelCard, pooling: Pooling | None) -> ResolvedValue[str]:
    if pooling is not None:
        return ResolvedValue("none", "nothing is generated")
    if not card.eos_ids:
        return ResolvedValue("none", "the model has no end-of-sequence token")
    return ResolvedValue(settings.grammar.backend, "grammar.backend")
