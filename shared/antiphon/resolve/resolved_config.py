"""Resolves settings and model card to the worker's plan: each decision has its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.model import CacheDtype, Dtype, KernelBackend, LinearFormat, ModelConfig
from antiphon.config.worker import captured_sizes
from antiphon.model_card.config_json import Task
from antiphon.model_card.files import gib
from antiphon.model_card.pooling import Pooling, PoolMode
from antiphon.model_card.served_model import draft_settings
from antiphon.resolve.device import INTERPRETER
from antiphon.resolve.draft import (
    ResolvedDraft,
    check_draft,
    check_draft_context,
    naming_draft,
)
from antiphon.resolve.memory import (
    BIDIRECTIONAL,
    OVERLAPPED,
    RUNNING,
    WeightStorage,
    activation_bytes,
    cache_pages,
    cross_requests,
    media_bytes,
    memory_budget,
    page_bytes,
    page_tokens_of,
    pool_bytes,
    resolve_weight_storage,
    state_count,
)
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.config.parallel import ParallelConfig
    from antiphon.config.settings import Settings
    from antiphon.config.worker import BatchingConfig
    from antiphon.model_card.card import ModelCard
    from antiphon.resolve.device import HostDevice
    from antiphon.resolve.draft import DraftCard

_VALUE_WIDTH = 16
"""A longer value shifts only its own reason."""
CACHED_BYTES_MAX = 64 << 20
"""Weights up to this size are read from CPU caches: steps are short, and services need a core."""
LONGEST = "the longest prompt, since chunked prefill is off"
UNCHUNKED = -1
"""The `batching.chunk_tokens` that disables chunked prefill, as in SGLang."""
CPU_CHUNK_TOKENS = 512
CPU_FILL_TOKENS = 256
"""With this many tokens a CPU computes at nearly its maximum rate: for layers of a small model on a
core with bf16 instructions, 128 tokens reach 88 %, 256 98 % and 512 97 % of the rate of 1,024."""
TILES_FILL_TOKENS = 1024
"""The same for a CPU with bf16 tiles (AMX), which computes faster but reads the weights no faster:
with the same model and prompts of 128 tokens, 1 prompt reaches 67 %, 2 reach 80 %, 4 reach 87 % and
8 reach 88 % of the rate of 16. With 16 prompts, passes of 8 instead of 4 finish the last one 42 ms
earlier and delay the mean by 17 ms (ADR 19)."""
POOLING_FILL_TOKENS = 1024
"""The same for a model that generates nothing: no decode waits, and what a step costs beside its
layers (its plan, and the messages with its results) is shared by four times as many texts."""
TILES_ISA = "amx"
ONE_RANK = ResolvedValue(1, "parallel.tp_size")
CUT_EXPERTS = ResolvedValue(1, "parallel.ep_size")
ONE_GROUP = ResolvedValue(1, "parallel.attn_dp_size")
ONE_STAGE = ResolvedValue(1, "parallel.pp_size")
UNLOADED = ResolvedValue("", "known once the model is loaded")
NO_GRAPHS = ResolvedValue[tuple[int, ...]]((), "batching.graphs")
NOT_YET_RUN = "not yet run on a GPU"
GRAPH_ROWS = 256
"""Default of `batching.graph_rows_max`; SGLang's on GPUs of up to 80 GB."""
ANY_BACKENDS = ResolvedValue[tuple[str, ...]]((), "the first of each operation that runs here")
NO_DRAFT = ResolvedValue[ResolvedDraft | None](None, "speculation.algorithm")


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
    ranks, stages = _ranks(settings, pooling, device), settings.parallel.pp_size
    layers = implementation or ResolvedValue(settings.model.implementation, "model.implementation")
    if layers.value == "transformers":
        card = card.with_full_heads()
    if device.kind != "cpu":
        _check_gpu(settings, layers.value)
    if card.source_tokens:
        _check_cross(settings)
    if stages > 1:
        _check_stages(card)
    backends = _backends(settings.model)
    free, device = device.memory_bytes, _within(settings, device)
    dtype = _dtype(settings, card, device)
    linear = _linear(settings, device, dtype.value)
    cache_dtype = _cache_dtype(settings, card, device, dtype.value)
    kept = resolve_weight_storage(settings, card, dtype.value, linear, device)
    groups, of_group = settings.parallel.attn_dp_size, _of_group(settings)
    kept = kept.over(settings.parallel.ranks, groups, card.attention_share)
    context = _context(settings, card)
    page_tokens = page_tokens_of(settings)
    whole = _whole(settings, card)
    step = _step(settings, context.value, whole=whole.value)
    drawing = min(settings.batching.running_max, step.value)
    beside = _draft(settings, card, device, draft, step.value)
    memory = memory_budget(
        settings,
        card,
        device.memory_bytes,
        dtype.value,
        kept.bytes.value,
        step.value,
        beside.value,
        gpu=device.kind == "cuda",
    )
    media = media_bytes(settings, memory, sees=sees)
    if not memory.gpu:
        memory = msgspec.structs.replace(memory, media=media.value)
    state_bytes = _staged(card.state_bytes(dtype.value, ranks.value // groups), card, stages)
    states = state_count(of_group, state_bytes, memory, pool_bytes(settings, memory))
    cross_bytes = card.cross_bytes(cache_dtype.value, page_tokens.value)
    crossing = cross_requests(settings, cross_bytes, pool_bytes(settings, memory))
    held = states.value * state_bytes
    token_bytes = _staged(card.kv_bytes(cache_dtype.value, ranks.value // groups), card, stages)
    each = f"{token_bytes} bytes per token"
    if beside.value is not None:
        each += f", and {beside.value.token_bytes.value} of the draft model"
        token_bytes += beside.value.token_bytes.value
    pages = cache_pages(
        of_group, memory, token_bytes, context.value, held + crossing.value * cross_bytes
    )
    cache_bytes = pages.value * page_bytes(page_tokens.value, token_bytes)
    overlap = _overlap(settings, device, pooling)
    running = _over_groups(
        groups,
        _running(
            of_group,
            pages.value,
            step.value // groups,
            states,
            overlap=overlap.value or stages > 1,
        ),
    )
    if 0 < crossing.value < running.value:
        running = crossing
    served = _fit(context, pages.value * page_tokens.value)
    if draft is not None:
        check_draft_context(settings, draft.card, served.value)
    return ResolvedConfig(
        device=_device(settings, device),
        dtype=dtype,
        quantization=kept.quantization,
        linear=linear,
        quantized=kept.quantized,
        deterministic=_deterministic(settings, linear, card),
        bits=_numerics_digest(
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
        cache_scales=_cache_scales(settings, cache_dtype.value),
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
        chunk_tokens=_chunk(settings, device, context.value, whole=whole.value),
        fill_tokens=_fill(settings, device, step.value, pooling),
        mixed=_mixed(settings),
        prefix=_prefix(settings, card, pooling),
        running_max=running,
        overlap=overlap,
        grammar=_grammar(settings, card, pooling),
        ranks=ranks,
        ep_ranks=ResolvedValue(settings.parallel.ep_size, "parallel.ep_size"),
        stages=_stages(settings, device),
        attention_groups=ResolvedValue(groups, "parallel.attn_dp_size"),
        draft=beside,
        graph_sizes=_graphs(settings, device, pooling, running.value),
        prefill_graph_sizes=_prefill_graphs(settings, device, step.value),
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
    said = f"model.device = {settings.model.device}"
    refused = {
        "model.implementation = transformers": implementation == "transformers",
        "speculation.draft_model with several ranks": (
            bool(settings.speculation.draft_model) and settings.parallel.ranks > 1
        ),
        "parallel.ep_size": settings.parallel.ep_size > 1,
    }
    for what, asked in refused.items():
        if asked:
            raise ConfigError(f"{said}: {what} runs on cpu only")


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


def _backends(model: ModelConfig) -> ResolvedValue[tuple[str, ...]]:
    """The backends that the settings name, as `operation:backend`."""
    said = {
        "model.attention_backend": model.attention_backend,
        "model.prefill_attention_backend": model.prefill_attention_backend,
        "model.decode_attention_backend": model.decode_attention_backend,
    }
    named = {name: backend for name, backend in said.items() if backend is not KernelBackend.AUTO}
    if len(set(named.values())) > 1:
        listed = ", ".join(f"{name} = {backend}" for name, backend in named.items())
        raise ConfigError(
            f"{listed}: prefills and decodes are rows of one pass, which one kernel attends in"
        )
    asked = {
        "attention.paged": next(iter(named.values()), KernelBackend.AUTO),
        "sampling.draw": model.sampling_backend,
        "moe.experts": model.expert_backend,
        "linear.fp8": model.fp8_backend,
    }
    forced = [f"{op}:{name}" for op, name in asked.items() if name is not KernelBackend.AUTO]
    if not forced:
        return ANY_BACKENDS
    return ResolvedValue(tuple(forced), "as model.*_backend name them")


def _within(settings: Settings, device: HostDevice) -> HostDevice:
    """What one rank may use of this machine."""
    model, local = settings.model, len(settings.parallel.local_ranks)
    cores = min(model.cores or device.cores, device.cores)
    # Ranks share the memory of the machine, and have a GPU each.
    free = device.memory_bytes * (local if device.kind == "cuda" else 1)
    memory_bytes = min(model.memory_bytes or free, free)
    return msgspec.structs.replace(
        device, cores=max(1, cores // local), memory_bytes=memory_bytes // local
    )


def _ranks(settings: Settings, pooling: Pooling | None, device: HostDevice) -> ResolvedValue[int]:
    parallel, ranks = settings.parallel, settings.parallel.tp_size
    parallel.check()
    said = f"parallel.tp_size = {ranks}"
    if parallel.pp_size > 1:
        said = f"parallel.pp_size = {parallel.pp_size}"
        if pooling is not None:
            raise ConfigError(f"{said}: a model that only pools has one stage")
        if settings.speculation.draft_model:
            raise ConfigError(
                f"speculation.draft_model: {said}: a model with a draft model has one stage; "
                "use parallel.tp_size (--tp-size)"
            )
    if (groups := parallel.attn_dp_size) > 1:
        said = f"parallel.attn_dp_size = {groups}"
        if pooling is not None:
            raise ConfigError(f"{said}: a model that only pools has one attention group")
        if settings.batching.running_max < groups:
            raise ConfigError(
                f"batching.running_max = {settings.batching.running_max}: must be at least {said}, "
                "whose groups share it"
            )
        if settings.speculation.draft_model:
            raise ConfigError(
                f"speculation.draft_model: {said}: with a draft model there is one attention group"
            )
        if settings.cache.hierarchical:
            raise ConfigError(f"cache.hierarchical: {said}: pages of several groups are not stored")
    if ranks == 1:
        return ONE_RANK
    if settings.model.deterministic and parallel.nodes > 1:
        raise ConfigError(
            f"model.deterministic: parallel.nodes = {parallel.nodes}: sums over machines depend on "
            "the size of a batch"
        )
    if settings.model.deterministic and device.kind != "cpu":
        raise ConfigError(
            f"model.deterministic: parallel.tp_size = {ranks}: sums over ranks on "
            f"{settings.model.device} depend on the size of a batch; use one rank"
        )
    reason = "layers run one by one, since the fused decoder sums over no ranks"
    if device.kind == "cuda":
        reason = f"each on a GPU of its own, which sum by NCCL: {NOT_YET_RUN}"
    if device.kind == INTERPRETER:
        reason = "each with an interpreter of its own, which sum by gloo"
    return ResolvedValue(ranks, f"parallel.tp_size; {reason}")


def _stages(settings: Settings, device: HostDevice) -> ResolvedValue[int]:
    stages, reason = settings.parallel.pp_size, "parallel.pp_size"
    if stages > 1 and device.kind == "cuda":
        reason += f"; each on GPUs of its own, linked by NCCL: {NOT_YET_RUN}"
    return ResolvedValue(stages, reason)


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
        dtype = _dtype(own, draft.card, device)
        linear = _linear(own, device, dtype.value)
        cache_dtype = _cache_dtype(own, draft.card, device, dtype.value)
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


def _dtype(settings: Settings, card: ModelCard, device: HostDevice) -> ResolvedValue[Dtype]:
    if settings.model.dtype is not Dtype.AUTO:
        return ResolvedValue(settings.model.dtype, "model.dtype")
    if device.kind == INTERPRETER:
        return ResolvedValue(Dtype.FLOAT32, "the interpreter is compared with the CPU")
    # Most tensors of a GGUF file whose dtype is unknown are in blocks, grouped or not.
    in_blocks = card.gguf and card.weights.bytes > 0 and card.weights.dtype is None
    quantized = card.quantization is not None or card.weights.grouped > 0 or in_blocks
    if quantized and device.lacking is None and card.dtype is not Dtype.BFLOAT16:
        # What its unquantized tensors are stored in says little of the precision of its weights.
        reason = f"weights are quantized; their activations need not be {card.dtype}"
        return ResolvedValue(Dtype.BFLOAT16, reason)
    return ResolvedValue(card.dtype, "the checkpoint's")


def _linear(settings: Settings, device: HostDevice, dtype: Dtype) -> ResolvedValue[LinearFormat]:
    said, lacking = settings.model.linear, _lacking(device, dtype)
    if said is LinearFormat.TILED and device.kind == "cpu":
        raise ConfigError("model.linear = tiled: runs on a GPU only; packed is the same on the CPU")
    if device.kind != "cpu" and settings.model.deterministic and said is LinearFormat.AUTO:
        return ResolvedValue(
            LinearFormat.TILED, "model.deterministic; weights in fp8 are converted"
        )
    if said is LinearFormat.TILED:
        return ResolvedValue(said, "model.linear")
    if said is LinearFormat.AUTO and lacking is None:
        return ResolvedValue(LinearFormat.PACKED, "read at memory bandwidth, stored once")
    if said is LinearFormat.AUTO:
        return ResolvedValue(LinearFormat.PLAIN, lacking or "")
    if said is LinearFormat.FP8:
        if device.lacking_fp8 is not None:
            raise ConfigError(f"model.linear = {said}: {device.lacking_fp8}")
        return ResolvedValue(LinearFormat.PLAIN, "model.linear = fp8; not stored in fp8")
    if said is LinearFormat.GROUPED and device.kind != "cpu":
        return ResolvedValue(LinearFormat.PLAIN, "model.linear = grouped; not stored in groups")
    if said is not LinearFormat.PLAIN and lacking is not None:
        raise ConfigError(f"model.linear = {said}: {lacking}")
    if said is LinearFormat.GROUPED:
        return ResolvedValue(LinearFormat.PACKED, "model.linear = grouped; not stored in groups")
    return ResolvedValue(said, "model.linear")


def _lacking(device: HostDevice, dtype: Dtype) -> str | None:
    float16 = "the CPU kernels do not support float16" if dtype is Dtype.FLOAT16 else None
    return device.lacking or float16


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
    if device.kind == "cpu" and (lacking := _lacking(device, dtype)) is not None:
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
    if linear.value is LinearFormat.PLAIN:
        raise ConfigError(
            "model.deterministic: results of torch's matmul depend on batch composition, and "
            f"model.linear is plain ({linear.reason})"
        )
    reason = "results of the kernels do not depend on batch composition"
    return ResolvedValue(value=True, reason=reason)


def _of_group(settings: Settings) -> Settings:
    """With the running requests of one attention group."""
    if (groups := settings.parallel.attn_dp_size) == 1:
        return settings
    running_max = settings.batching.running_max // groups
    batching = msgspec.structs.replace(settings.batching, running_max=running_max)
    return msgspec.structs.replace(settings, batching=batching)


def _over_groups(groups: int, each: ResolvedValue[int]) -> ResolvedValue[int]:
    if groups == 1:
        return each
    return ResolvedValue(each.value * groups, f"{groups} attention groups: {each.reason}")


def _staged(all_layers: int, card: ModelCard, stages: int) -> int:
    """What of a size of all layers the stage with the most layers has."""
    return -(-all_layers * -(-card.layers // stages) // card.layers)


def _numerics_digest(
    device: HostDevice,
    card: ModelCard,
    dtype: Dtype,
    linear: LinearFormat,
    kept: WeightStorage,
    cache: CacheDtype,
    parallel: ParallelConfig,
    backends: tuple[str, ...],
) -> ResolvedValue[str]:
    """In the form of a config digest, so that differing fields of two workers can be named."""
    parts = {"dtype": str(dtype), "linear": str(linear), **kept.numerics, **device.arithmetic}
    if cache.eight_bits:
        parts["cache"] = str(cache)
    parts |= dict(each.split(":") for each in backends)
    if card.rope_factors is not None:
        parts["rope"] = card.rope_factors
    if parallel.tp_size > 1:
        parts["ranks"] = str(parallel.tp_size)
    if parallel.ep_size > 1:
        parts["expert ranks"] = str(parallel.ep_size)
    if parallel.pp_size > 1:
        parts["stages"] = str(parallel.pp_size)
    if parallel.attn_dp_size > 1:
        parts["attention groups"] = str(parallel.attn_dp_size)
    text = ",".join(f"{name}:{value}" for name, value in parts.items())
    return ResolvedValue(text, "what the numerics depend on, besides the model")


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
    whole = f"{context.value} ({context.reason})"
    return ResolvedValue(cache_tokens, f"limited by the KV cache pool, of {whole}")


def _pooling(settings: Settings, pooling: Pooling | None) -> ResolvedValue[Pooling | None]:
    if pooling is None:
        return ResolvedValue(None, "a generative model")
    if settings.model.embedding and pooling.task is Task.EMBED:
        return ResolvedValue(pooling, "model.embedding and the sentence-transformers files, if any")
    return ResolvedValue(pooling, f"the task of this architecture is {pooling.task}")


def _whole(settings: Settings, card: ModelCard) -> ResolvedValue[bool]:
    if not card.causal:
        return ResolvedValue(value=True, reason=BIDIRECTIONAL)
    whole = settings.batching.chunk_tokens == UNCHUNKED
    reason = "batching.chunk_tokens = -1" if whole else "prompts may be prefilled in chunks"
    return ResolvedValue(whole, reason)


def _step(settings: Settings, context_tokens: int, *, whole: bool) -> ResolvedValue[int]:
    batching = settings.batching
    # A prompt that is never chunked takes a whole forward pass regardless of the limit; if the
    # settings allow more prompt tokens than that, several prompts may share the pass.
    prompts = max(context_tokens, batching.fill_tokens or 0)
    if whole and prompts > batching.tokens_max:
        longest = prompts == context_tokens
        return ResolvedValue(prompts, LONGEST if longest else "batching.fill_tokens")
    return ResolvedValue(batching.tokens_max, "batching.tokens_max")


def _chunk(
    settings: Settings, device: HostDevice, context_tokens: int, *, whole: bool
) -> ResolvedValue[int]:
    batching = settings.batching
    if whole:
        return ResolvedValue(context_tokens, LONGEST)
    if batching.chunk_tokens is not None:
        return ResolvedValue(batching.chunk_tokens, "batching.chunk_tokens")
    if device.kind == "cpu" and batching.tokens_max > CPU_CHUNK_TOKENS:
        reason = "longer chunks are no faster on a CPU and delay decodes"
        return ResolvedValue(CPU_CHUNK_TOKENS, reason)
    return ResolvedValue(batching.tokens_max, "batching.tokens_max")


def _fill(
    settings: Settings, device: HostDevice, step_tokens: int, pooling: Pooling | None
) -> ResolvedValue[int]:
    batching = settings.batching
    if batching.fill_tokens is not None:
        return ResolvedValue(batching.fill_tokens, "batching.fill_tokens")
    if device.kind == "cpu":
        enough, reason = CPU_FILL_TOKENS, "saturates a CPU; more would delay the first requests"
        if device.arithmetic.get("isa") == TILES_ISA:
            enough, reason = TILES_FILL_TOKENS, "saturates AMX tiles; the last requests wait less"
        if pooling is not None:
            enough, reason = POOLING_FILL_TOKENS, "no decode waits, and steps are shared by more"
        if step_tokens > enough:
            return ResolvedValue(enough, reason)
    return ResolvedValue(step_tokens, "as many as fit into a step")


def _mixed(settings: Settings) -> ResolvedValue[bool]:
    if not settings.batching.mixed:
        return ResolvedValue(value=False, reason="batching.mixed")
    reason = "prefill reads all weights anyway: decodes in the same batch are almost free"
    return ResolvedValue(value=True, reason=reason)


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


def _overlap(
    settings: Settings, device: HostDevice, pooling: Pooling | None
) -> ResolvedValue[bool]:
    if not settings.batching.overlap:
        return ResolvedValue(value=False, reason="batching.overlap")
    if pooling is not None:
        return ResolvedValue(value=False, reason="nothing is generated")
    if settings.parallel.pp_size > 1:
        return ResolvedValue(value=True, reason="batching.overlap; stages wait for each other")
    if device.kind != "cpu" and settings.speculation.draft_model:
        return ResolvedValue(value=False, reason="a draft model follows each step")
    if device.kind != "cpu":
        reason = "batching.overlap; the device computes while the host plans"
        return ResolvedValue(value=True, reason=reason)
    return ResolvedValue(value=True, reason="batching.overlap, if the warm-up finds it faster")


def _graphs(
    settings: Settings, device: HostDevice, pooling: Pooling | None, running_max: int
) -> ResolvedValue[tuple[int, ...]]:
    """Batch sizes of the decode steps that are captured, with their sums over ranks."""
    if not settings.batching.decode_graphs:
        return ResolvedValue((), "batching.decode_graphs")
    if (reason := _uncaptured(settings, device)) is not None:
        return ResolvedValue((), reason)
    if pooling is not None:
        return ResolvedValue((), "nothing is generated")
    sizes = _graph_sizes(settings.batching, running_max)
    if settings.parallel.ranks == 1:
        return sizes
    return ResolvedValue(sizes.value, f"{sizes.reason}; sums over ranks inside: {NOT_YET_RUN}")


def _uncaptured(settings: Settings, device: HostDevice) -> str | None:
    """Why nothing is captured; None: something may be."""
    if not settings.batching.graphs:
        return NO_GRAPHS.reason
    if device.kind == "cpu":
        return "a GPU has them"
    if settings.parallel.attn_dp_size > 1:
        return "attention groups are launched layer by layer"
    if settings.speculation.algorithm == "eagle3":
        return "a draft head reads what enters single layers"
    return "stages are launched layer by layer" if settings.parallel.pp_size > 1 else None


def _graph_sizes(batching: BatchingConfig, running_max: int) -> ResolvedValue[tuple[int, ...]]:
    """Batch sizes of the decode steps that are captured."""
    if listed := captured_sizes(batching.graph_sizes):
        most = min(batching.graph_rows_max or listed[-1], running_max)
        sizes = tuple(size for size in listed if size <= most)
        return ResolvedValue(sizes, "batching.graph_sizes")
    most = min(batching.graph_rows_max or GRAPH_ROWS, running_max)
    if not batching.graph_padding:
        return ResolvedValue(tuple(range(1, most + 1)), "batching.graph_padding")
    # SGLang's: rare sizes are padded by up to a half, and others by less than a sixteenth.
    every = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most, 32))
    sizes = (*(size for size in every if size < most), most)
    return ResolvedValue(sizes, f"up to {most} running requests")


def _prefill_graphs(
    settings: Settings, device: HostDevice, step_tokens: int
) -> ResolvedValue[tuple[int, ...]]:
    """Numbers of tokens of the prefills that are captured in pieces."""
    batching = settings.batching
    if not batching.prefill_graphs:
        return ResolvedValue((), "batching.prefill_graphs")
    if (reason := _uncaptured(settings, device)) is not None:
        return ResolvedValue((), reason)
    listed, most = captured_sizes(batching.prefill_graph_sizes), batching.prefill_graph_tokens_max
    if not listed and most is None:
        return ResolvedValue((), "batching.prefill_graph_sizes: none are listed")
    most = min(most or listed[-1], step_tokens)
    if listed:
        sizes = tuple(size for size in listed if size <= most)
        return ResolvedValue(sizes, "batching.prefill_graph_sizes")
    # SGLang's: from 64 tokens on they are padded by less than a quarter.
    every = (*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))
    every = (*every, *range(1280, 4097, 256), *range(4608, most, 512))
    sizes = (*(size for size in every if size < most), most)
    return ResolvedValue(sizes, f"up to {most} tokens of a step")


def _running(
    settings: Settings, pages: int, step_tokens: int, states: ResolvedValue[int], *, overlap: bool
) -> ResolvedValue[int]:
    """The running requests: each takes at least a page and its states, and a token per step."""
    each, running_max = OVERLAPPED if overlap else RUNNING, settings.batching.running_max
    fit = max(1, states.value // each)
    if states.value and running_max > fit:
        return ResolvedValue(min(pages, step_tokens, fit), f"{each} states per request")
    if running_max > step_tokens:
        return ResolvedValue(min(pages, step_tokens), "limited by the tokens of a step")
    if running_max > pages:
        return ResolvedValue(pages, "at least one page per request")
    return ResolvedValue(running_max, "batching.running_max")
