"""What a worker's memory holds: weights, activations, pages of the KV cache, recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype, LinearFormat
from antiphon.config.quantization import (
    GPU_KERNELS,
    NV_SCALE_BYTES,
    Nvfp4,
    QuantizationConfig,
    choose_quantization,
)
from antiphon.model_card.card import ModelCard, item_bytes
from antiphon.model_card.config_json import Task
from antiphon.model_card.files import gib
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.config.parallel import ParallelConfig
    from antiphon.config.settings import Settings
    from antiphon.resolve.device import HostDevice
    from antiphon.resolve.draft import ResolvedDraft


INT8_FORMATS = (LinearFormat.INT8, LinearFormat.INT8_DYNAMIC)
"""Formats of linear layers that take one byte per weight."""
KEEPING_FP8 = (LinearFormat.AUTO, LinearFormat.FP8)
"""Settings with which weights stay in fp8, where a kernel multiplies that."""
KEEPING = (LinearFormat.AUTO, LinearFormat.GROUPED)
"""Settings with which quantized weights stay as they are stored, where the kernels read that."""
LOGIT_BYTES = 4
"""Logits are float32 for every model."""
LOGIT_COPIES = 3
"""The logits, the processed logits, and the sorted or cumulated copy for sampling."""
EXPANDED_BYTES_MAX = 512 * 1024**2
"""Maximum size of keys and values expanded from latents, with the buffers of the expansion."""
PROMPT_LOGITS_BYTES_MAX = 32 * 1024**2
"""Maximum memory of prompt logits at a time: logprobs of a long prompt are computed in chunks."""
HOST_POOL_RATIO, HOST_POOL_BYTES_MAX = 0.25, 2 * 1024**3
"""Default size of the pool in the memory of a machine, which other programs need as well."""
GPU_POOL_RATIO = 0.9
"""The same of a GPU; the rest is for workspaces of libraries, and what its allocator rounds up."""


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Division of the free memory, in bytes. The rest is available for the cache."""

    free: int
    """Memory that this process may use, within the limits of its containers."""
    weights: int
    activations: int
    """Activations of the largest step."""
    logits: int
    """Logits of the maximum number of rows that sample a token in one step."""
    scored: int
    """Logits of the prompt tokens whose logprobs are computed at a time."""
    plans: int = 0
    """Workspace and plans of a backend of attention that plans steps on the host."""
    media: int = 0
    """Embeddings of images that requests wait for or are prefilled with; none in a GPU's memory."""
    gpu: bool = False
    """Whether it is the memory of a GPU, which serves nothing else."""

    @property
    def rest(self) -> int:
        """Memory left for the cache; negative if there is too little for a single step."""
        taken = self.weights + self.activations + self.logits + self.scored
        return self.free - taken - self.plans - self.media

    def __str__(self) -> str:
        return (
            f"{gib(self.free)} free, weights {gib(self.weights)}, "
            f"activations {gib(self.activations)}, logits {gib(self.logits)}, "
            f"prompt logits {gib(self.scored)}"
            + (f", plans of attention {gib(self.plans)}" if self.plans else "")
            + (f", embeddings of images {gib(self.media)}" if self.media else "")
        )


def weight_bytes(
    card: ModelCard,
    dtype: Dtype,
    linear: LinearFormat,
    *,
    quantized: LinearFormat = LinearFormat.PLAIN,
    count: int = 0,
    grouped_bytes: int = 0,
    wide: int = 0,
) -> int:
    """Bytes of the parameters; one per int8 weight, except for an embedding that is not the head.

    `count` of them are quantized in the checkpoint: stored as `quantized`, the others as `linear`;
    `grouped_bytes` is the size of their codes and scales. `wide` of them do not stay as they are
    stored.
    """
    item = item_bytes(dtype)
    plain = card.weights.count - count
    each = 1 if quantized in INT8_FORMATS else item
    if quantized is LinearFormat.FP8:
        each = FP8_BYTES
    if quantized is LinearFormat.GROUPED:
        each = grouped_bytes / max(count, 1)
    wide = min(count, wide)
    stored = wide * item + round((count - wide) * each)
    stored += _beside_bytes(card, dtype)
    if linear not in INT8_FORMATS:
        return stored + plain * item
    return stored + plain - card.looked_up + card.looked_up * item


FP8_BYTES = 1 + 4 / 128
"""Of a weight in fp8 and its part of the scale of an output, or of 128 inputs of an output."""


def _wide_parameters(
    card: ModelCard, quantization: QuantizationConfig | None, parallel: ParallelConfig
) -> int:
    """Quantized parameters that do not stay as they are stored on a GPU.

    Those of a head, and those whose groups ranks would have to divide: down projections, and all of
    experts.
    """
    if quantization is None:
        return 0
    wide = 0
    if quantization.head and quantization.scheme("lm_head") and not card.tied:
        wide += card.vocabulary_size * card.hidden_size
    dense = card.layers
    if (experts := card.experts) is not None:
        dense -= experts.layers
        if _divides_groups(quantization, experts.width, parallel.tp_size // parallel.ep_size):
            wide += experts.layers * experts.count * 3 * experts.width * card.hidden_size
    if _divides_groups(quantization, card.mlp_width, parallel.tp_size):
        wide += dense * card.mlp_width * card.hidden_size
    return wide


def _divides_groups(quantization: QuantizationConfig, inputs: int, ranks: int) -> bool:
    if ranks == 1:
        return False
    return any(inputs // ranks % rule.scheme.group_of(inputs) for rule in quantization.rules)


def _beside_bytes(card: ModelCard, dtype: Dtype) -> int:
    """Bytes beyond the dtype's: wider routers, and the second copy of MLA up-projections."""
    routers = card.layers * card.streams * card.hidden_size
    if card.experts is not None:
        routers += card.experts.layers * card.experts.count * card.hidden_size
    beside = routers * (item_bytes(Dtype.FLOAT32) - item_bytes(dtype))
    if card.latent is not None:
        beside += card.layers * card.latent.up_parameters(card.heads) * item_bytes(dtype)
    return beside


AUX_LAYERS = 3
"""Layers of the served model that draft heads usually read."""


def activation_bytes(card: ModelCard, dtype: Dtype, tokens: int) -> int:
    """Approximate peak of the activations of a forward pass of `tokens` tokens.

    Residual and normalized stream, and the fused projections of a layer with their results. Both
    blocks count, though one follows the other: the allocator caches the memory that the first one
    frees, and its size does not match that of the second one.
    """
    size = max((each.head_size for each in card.layer_heads), default=card.head_size)
    attention, expanded = (2 * card.heads + 4 * card.kv_heads) * size, 0
    if card.latent is not None:
        attention, expanded = card.latent.token_numbers(card.heads), EXPANDED_BYTES_MAX
    width = 3 * card.hidden_size + attention + _feed_forward_numbers(card)
    width += 4 * card.per_layer_width  # rows of the table, projections, their norms and sums
    width += 8 * card.streams * card.hidden_size  # before and behind a layer, and in float32
    if card.target_hidden_size is not None:
        # What a draft head reads of the served model, which keeps it; and twice the stream.
        width += 2 * AUX_LAYERS * card.target_hidden_size + 2 * card.hidden_size
    recurrent = 0 if card.states is None else card.states.activation_bytes(tokens)
    return tokens * item_bytes(dtype) * width + expanded + recurrent


def _feed_forward_numbers(card: ModelCard) -> int:
    """Elements per token: inputs and outputs of its experts, and their blocks if all are alike."""
    dense, experts = 4 * card.mlp_width, card.experts
    if experts is None:
        return dense
    moved = 4 * experts.chosen * card.hidden_size
    return max(dense, moved + 4 * experts.width + 4 * experts.shared_width)


def logits_bytes(card: ModelCard, rows: int) -> int:
    """Peak memory of sampling a token for each of `rows` rows."""
    if card.task not in (Task.GENERATE, Task.DRAFT):
        return 0
    return LOGIT_COPIES * rows * card.vocabulary_size * LOGIT_BYTES


def prompt_logits_rows(vocabulary_size: int, bytes_max: int = PROMPT_LOGITS_BYTES_MAX) -> int:
    """Number of prompt tokens whose logprobs are computed at a time."""
    return max(1, bytes_max // (vocabulary_size * LOGIT_BYTES))


BIDIRECTIONAL = "attention is bidirectional"
RUNNING = 2
"""States of a running request: the one that its next step reads, and the one that it writes."""
OVERLAPPED = 3
"""The same with overlapped steps, where a step is launched before the result of the one before is
read: it writes one more."""


class WeightStorage(msgspec.Struct, frozen=True):
    quantization: ResolvedValue[str]
    """Quantization of the checkpoint, or at load time."""
    quantized: ResolvedValue[LinearFormat]
    """Format of quantized linear layers; others have the plan's `linear` format."""
    bytes: ResolvedValue[int]
    """Size of all weights."""

    def over(self, ranks: int, groups: int = 1, attention: float = 0.0) -> WeightStorage:
        """What each of several ranks holds; what all of them have, like norms, is small.

        Each of the attention `groups` has all of this share of the weights.
        """
        if ranks == 1:
            return self
        whole, reason = self.bytes.value, f"1/{ranks} of {self.bytes.reason}"
        if groups > 1:
            whole += int(whole * attention * (groups - 1))
            reason += f", and 1/{ranks // groups} of those of attention"
        share = ResolvedValue(-(-whole // ranks), reason)
        return msgspec.structs.replace(self, bytes=share)

    @property
    def numerics(self) -> Mapping[str, str]:
        if self.quantization.value == "none":
            return {}
        return {"quantized": f"{self.quantization.value} as {self.quantized.value}"}


def resolve_weight_storage(
    settings: Settings,
    card: ModelCard,
    dtype: Dtype,
    linear: ResolvedValue[LinearFormat],
    device: HostDevice,
) -> WeightStorage:
    """Resolve the format of quantized linear layers: int8 where that is exact, on a GPU fp8."""
    requested, gpu = settings.model.quantization, device.kind != "cpu"
    quantization = choose_quantization(card.quantization, requested, gguf=card.gguf)
    count = _count(card, quantization, gpu=gpu)
    grouped = _grouped_bytes(card, quantization, dtype, count, gpu=gpu)
    if quantization is not None and quantization.fp8:
        quantized = _fp8(settings, card, linear, device.lacking_fp8, dtype, count)
    else:
        quantized = _quantized(settings, quantization, linear, dtype, count, grouped, device)
    taken = weight_bytes(
        card,
        dtype,
        linear.value,
        quantized=quantized.value,
        count=count,
        grouped_bytes=grouped or 0,
        wide=_wide_parameters(card, quantization, settings.parallel) if gpu else 0,
    )
    of = f", {count} of them quantized" if count else ""
    read = gib(token_weight_bytes(card, dtype, taken))
    return WeightStorage(
        _quantization(settings, card, quantization),
        quantized,
        ResolvedValue(taken, f"{card.weights.count} parameters{of}; a token reads {read}"),
    )


def token_weight_bytes(card: ModelCard, dtype: Dtype, taken: int) -> int:
    """Approximate bytes of weights that one token reads, of all that take so much memory.

    It reads one row of a table that is not the head, and none of the experts that are not chosen.
    """
    each = taken / card.weights.count if card.weights.count else 0.0
    unread = card.looked_up * (each if card.gguf else item_bytes(dtype))
    if (experts := card.experts) is not None:
        idle = experts.layers * (experts.count - experts.chosen)
        unread += idle * 3 * experts.width * card.hidden_size * each
    return max(round(taken - unread), 0)


def _grouped_bytes(
    card: ModelCard,
    quantization: QuantizationConfig | None,
    dtype: Dtype,
    count: int,
    *,
    gpu: bool,
) -> int | None:
    """Size of the codes and scales of quantized weights; None: not all are stored in groups."""
    if card.gguf:
        kept = card.weights.gpu_grouped_bytes if gpu else card.weights.grouped_bytes
        wide = card.weights.wide_scale_bytes if dtype is Dtype.FLOAT32 else 0
        return kept + wide or None
    if quantization is None:
        return None
    # Scales are kept in as many bytes as activations.
    scale_bytes = NV_SCALE_BYTES if gpu and _nvfp4(quantization) else item_bytes(dtype)
    each = quantization.grouped_bytes(scale_bytes)
    return None if each is None else round(count * each)


def _nvfp4(quantization: QuantizationConfig | None) -> bool:
    rules = () if quantization is None else quantization.rules
    return any(isinstance(rule.scheme, Nvfp4) for rule in rules)


def _quantization(
    settings: Settings, card: ModelCard, quantization: QuantizationConfig | None
) -> ResolvedValue[str]:
    said = settings.model.quantization
    if card.gguf:
        return ResolvedValue("gguf", "each tensor of the file has its own type")
    if quantization is None:
        return ResolvedValue("none", "the checkpoint is not quantized")
    name = str(quantization.method)
    if said in GPU_KERNELS:
        return ResolvedValue(name, f"{said} is a GPU kernel; the weights are in {name} format")
    if quantization.online:
        return ResolvedValue(name, "model.quantization: weights are quantized while loading")
    reason = "config.json" if card.quantization else "model.quantization"
    if _nvfp4(quantization):
        reason += "; weights alone (W4A16): stored scales of activations are not used"
    return ResolvedValue(name, reason)


def _count(card: ModelCard, quantization: QuantizationConfig | None, *, gpu: bool) -> int:
    if card.gguf:
        return card.weights.gpu_grouped if gpu else card.weights.grouped
    if quantization is None or not quantization.online:
        return card.weights.quantized
    tables = card.vocabulary_size * card.hidden_size + card.looked_up
    return max(card.weights.count - tables, 0)


def _fp8(
    settings: Settings,
    card: ModelCard,
    linear: ResolvedValue[LinearFormat],
    lacking_fp8: str | None,
    dtype: Dtype,
    count: int,
) -> ResolvedValue[LinearFormat]:
    said = settings.model.linear
    if linear.value is LinearFormat.TILED:
        return linear
    if said in KEEPING_FP8 and lacking_fp8 is None:
        of_what = "" if card.experts is None else " with those of experts"
        reason = f"fp8 as stored, {gib(count)}{of_what}; activations are rounded to fp8"
        return ResolvedValue(LinearFormat.FP8, reason)
    if said not in KEEPING:
        return linear
    if linear.value is LinearFormat.PLAIN:
        return ResolvedValue(linear.value, f"{linear.reason}; {lacking_fp8}")
    return _converted(linear, dtype, count)


def _quantized(
    settings: Settings,
    quantization: QuantizationConfig | None,
    linear: ResolvedValue[LinearFormat],
    dtype: Dtype,
    count: int,
    grouped_bytes: int | None,
    device: HostDevice,
) -> ResolvedValue[LinearFormat]:
    if quantization is None and grouped_bytes is None:
        return ResolvedValue(linear.value, "model.linear")
    said = settings.model.linear
    packs = linear.value not in (LinearFormat.PLAIN, LinearFormat.TILED)
    if said not in KEEPING or not (packs or device.kind != "cpu"):
        return ResolvedValue(linear.value, linear.reason)
    if grouped_bytes is not None:
        wide = gib(count * item_bytes(dtype))
        reason = f"codes and scales as stored, {gib(grouped_bytes)}; in {dtype}, {wide}"
        return ResolvedValue(LinearFormat.GROUPED, reason)
    assert quantization is not None
    if quantization.int8_exact:
        reason = "int8 as stored; activations are not quantized"
        if not quantization.dynamic_activations:
            return ResolvedValue(LinearFormat.INT8, reason)
        if device.lacking_int8 is not None:
            return ResolvedValue(LinearFormat.INT8, f"{reason}: {device.lacking_int8}")
        reason = "int8 as stored; activations are quantized to int8, as the checkpoint specifies"
        return ResolvedValue(LinearFormat.INT8_DYNAMIC, reason)
    if not packs:
        return ResolvedValue(linear.value, linear.reason)
    return _converted(linear, dtype, count)


def _converted(
    linear: ResolvedValue[LinearFormat], dtype: Dtype, count: int
) -> ResolvedValue[LinearFormat]:
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
    draft: ResolvedDraft | None = None,
    *,
    plans: int = 0,
    gpu: bool = False,
) -> MemoryBudget:
    """Divide the free memory; a draft model has weights and activations of its own.

    Its logits fit in the memory of the model's, which are as many rows and copied more often.
    """
    activations = activation_bytes(card, dtype, step_tokens)
    if draft is not None:
        weights += draft.weight_bytes.value
        activations += draft.activation_bytes.value
    memory = MemoryBudget(
        free=free,
        weights=weights,
        activations=activations,
        logits=logits_bytes(card, min(settings.batching.running_max, step_tokens)),
        scored=logits_bytes(card, min(step_tokens, prompt_logits_rows(card.vocabulary_size))),
        plans=plans,
        gpu=gpu,
    )
    if memory.weights > memory.free:
        limit = settings.model.memory_bytes
        cause = "" if limit is None else f"; model.memory_bytes = {limit} limits this worker"
        raise ConfigError(f"not enough memory for the weights: {memory}{cause}")
    return memory


NO_PLANS = ResolvedValue(0, "no backend of attention plans steps on the host")
PLANNING = "attention.paged:flashinfer"
"""The backend that does, and its operation, as settings name them."""


def plan_bytes(
    card: ModelCard, device: HostDevice, backends: tuple[str, ...], graphs: int
) -> ResolvedValue[int]:
    """Memory of a backend that plans steps on the host, if it may attend, with so many graphs."""
    memory, attention = device.plan_memory, PLANNING.partition(":")[0]
    named = [each for each in backends if each.startswith(f"{attention}:")]
    if memory is None or named not in ([], [PLANNING]):
        return NO_PLANS
    reason = "workspace and plans of FlashInfer, which attends if it has the modules"
    if card.latent is None or not graphs:
        return ResolvedValue(memory.steps, reason)
    whole = memory.steps + graphs * memory.latent_graph
    return ResolvedValue(whole, f"{reason}; of {graphs} graphs {gib(whole - memory.steps)}")


PAGE_TOKENS = 64
"""Default of `cluster.page_tokens`: a block of placement and of kv_storage."""
MEDIA_SHARE = 4
"""Embeddings take at most a quarter of what is left beside weights and activations."""


def media_bytes(settings: Settings, memory: MemoryBudget, *, sees: bool) -> ResolvedValue[int]:
    """Memory for the embeddings of media, of a model that takes any, beside all else."""
    most, share = settings.batching.media_bytes_max, max(0, memory.rest) // MEDIA_SHARE
    if not sees:
        return ResolvedValue(0, "the model takes no images")
    if memory.gpu:
        return ResolvedValue(most, "batching.media_bytes_max, in the memory of the machine")
    if most <= share:
        return ResolvedValue(most, "batching.media_bytes_max")
    return ResolvedValue(share, f"a quarter of {gib(memory.rest)}, what is left")


def state_count(
    settings: Settings, state_bytes: int, memory: MemoryBudget, pool: ResolvedValue[int]
) -> ResolvedValue[int]:
    """Divide the pool between pages and states; a state of 0 bytes means that there are none."""
    if not state_bytes:
        return ResolvedValue(0, "the model has no recurrent layers")
    cache = settings.cache
    page_tokens = page_tokens_of(settings).value
    if cache.checkpoint_tokens % page_tokens:
        raise ConfigError(
            f"cache.checkpoint_tokens = {cache.checkpoint_tokens}: must be a multiple of"
            f" cluster.page_tokens = {page_tokens}"
        )
    if cache.states_max is not None:
        said = f"cache.states_max = {cache.states_max}"
        if cache.states_max < RUNNING or cache.states_max * state_bytes > memory.rest:
            each = gib(state_bytes)
            raise ConfigError(f"{said}: a request needs {RUNNING} states of {each}: {memory}")
        return ResolvedValue(cache.states_max, said)
    count = int(pool.value * cache.states_ratio / (1 + cache.states_ratio)) // state_bytes
    if count < RUNNING:
        needed = f"the {RUNNING} states of one request"
        raise ConfigError(f"not enough memory for {needed}: {pool.reason}")
    return ResolvedValue(count, f"cache.states_ratio = {cache.states_ratio} of {pool.reason}")


def cross_requests(
    settings: Settings, request_bytes: int, pool: ResolvedValue[int]
) -> ResolvedValue[int]:
    """How many requests have a cross-attention cache, each of so many bytes: in half of the pool.

    0 bytes mean that there is no cross attention.
    """
    if not request_bytes:
        return ResolvedValue(0, "no layer has cross attention")
    if (fit := pool.value // 2 // request_bytes) < 1:
        needed = f"the cross attention of one request, {gib(request_bytes)}"
        raise ConfigError(f"not enough memory for {needed}: {pool.reason}")
    if fit >= settings.batching.running_max:
        return ResolvedValue(settings.batching.running_max, "batching.running_max")
    return ResolvedValue(fit, f"{gib(request_bytes)} of cross attention each, in half of the pool")


def page_tokens_of(settings: Settings) -> ResolvedValue[int]:
    """Tokens of a page: it is read fast if it is long."""
    chosen = settings.cluster.page_tokens
    if chosen is None:
        return ResolvedValue(PAGE_TOKENS, "a page is read as one piece of memory")
    return ResolvedValue(chosen, "cluster.page_tokens")


def page_bytes(page_tokens: int, token_bytes: int) -> int:
    """Bytes of a page, which has room for an even number of tokens: kernels read them in pairs."""
    return (page_tokens + page_tokens % 2) * token_bytes


def cache_pages(
    settings: Settings, memory: MemoryBudget, token_bytes: int, context_tokens: int, held: int
) -> ResolvedValue[int]:
    """The number of pages; `held` bytes of the pool are states, or caches of cross attention."""
    page_tokens = page_tokens_of(settings).value
    each = page_bytes(page_tokens, token_bytes)
    if settings.cache.tokens_max is not None:
        return _requested_pages(settings.cache.tokens_max, page_tokens, each, memory, held)
    enough = settings.batching.running_max * -(-context_tokens // page_tokens)
    if not each:
        return ResolvedValue(enough, f"pages only count tokens; no KV cache: {BIDIRECTIONAL}")
    pool = pool_bytes(settings, memory)
    pages = (pool.value - held) // each
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
    elif enough < pages:
        running = settings.batching.running_max
        return ResolvedValue(enough, f"enough for {running} requests of full context length")
    return ResolvedValue(pages, pool.reason)


def _requested_pages(
    tokens_max: int, page_tokens: int, each: int, memory: MemoryBudget, held: int
) -> ResolvedValue[int]:
    """The configured size, which must fit as well: checked here, not while serving."""
    pages, said = tokens_max // page_tokens, f"cache.tokens_max = {tokens_max}"
    if pages < 1:
        raise ConfigError(f"{said}: must be at least one page, {page_tokens} tokens")
    if pages * each > memory.rest - held:
        raise ConfigError(f"{said}: {gib(pages * each)} do not fit: {memory}")
    return ResolvedValue(pages, said)


def pool_bytes(settings: Settings, memory: MemoryBudget) -> ResolvedValue[int]:
    """Bytes for the pool: a share of the remaining memory, or the rest of a share of all of it."""
    cache = settings.cache
    if cache.static_ratio is not None:
        share = int(memory.free * cache.static_ratio) - memory.weights
        reason = f"cache.static_ratio = {cache.static_ratio} of {memory}"
        return ResolvedValue(max(share, 0), reason)
    ratio, limit = cache.memory_ratio, cache.bytes_max
    if ratio is None:
        ratio = GPU_POOL_RATIO if memory.gpu else HOST_POOL_RATIO
    if limit is None and not memory.gpu:
        limit = HOST_POOL_BYTES_MAX
    share = int(memory.rest * ratio)
    if limit is not None and share > limit:
        return ResolvedValue(limit, f"cache.bytes_max = {gib(limit)}; {memory}")
    return ResolvedValue(max(share, 0), f"cache.memory_ratio = {ratio} of {memory}")
