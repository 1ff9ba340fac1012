"""What a step of the batching loop may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype
from antiphon.resolve.memory import BIDIRECTIONAL, OVERLAPPED, RUNNING
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from antiphon.config.settings import Settings
    from antiphon.model_card.card import ModelCard
    from antiphon.model_card.pooling import Pooling
    from antiphon.resolve.device import HostDevice

LONGEST = "the longest prompt, since chunked prefill is off"
UNCHUNKED = -1
"""The `batching.chunk_tokens` that disables chunked prefill, as in SGLang."""
CPU_CHUNK_TOKENS = 512
CPU_FILL_TOKENS = 256
"""With this many tokens a CPU computes at nearly its maximum rate: for layers of a small model on a
core with bf16 instructions, 128 tokens reach 88 %, 256 98 % and 512 97 % of the rate of 1,024."""
TILES_CHUNK_TOKENS = 1024
"""With bf16 tiles (AMX) a small model takes 6 % less time for prompts of 1,024 to 7,000 tokens than
in chunks of 512, and a chunk half the time that one of 512 takes without. In chunks of 2,048 those
of 4,000 and more take another 4 to 5 % less, and in those of 4,096 no less than that: so long are
chunks while no other request would wait for them."""
TILES_FILL_TOKENS = 1024
"""The same for a CPU with bf16 tiles (AMX), which computes faster but reads the weights no faster:
with the same model and prompts of 128 tokens, 1 prompt reaches 67 %, 2 reach 80 %, 4 reach 87 % and
8 reach 88 % of the rate of 16. With 16 prompts, passes of 8 instead of 4 finish the last one 42 ms
earlier and delay the mean by 17 ms (ADR 19)."""
POOLING_FILL_TOKENS = 1024
"""The same for a model that generates nothing: no decode waits, and what a step costs beside its
layers (its plan, and the messages with its results) is shared by four times as many texts."""
TILES_ISA = "amx"


def resolve_context(settings: Settings, card: ModelCard) -> ResolvedValue[int]:
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


def fit_context(context: ResolvedValue[int], cache_tokens: int) -> ResolvedValue[int]:
    if context.value <= cache_tokens:
        return context
    whole = f"{context.value} ({context.reason})"
    return ResolvedValue(cache_tokens, f"limited by the KV cache pool, of {whole}")


def resolve_whole_prompts(settings: Settings, card: ModelCard) -> ResolvedValue[bool]:
    if not card.causal:
        return ResolvedValue(value=True, reason=BIDIRECTIONAL)
    whole = settings.batching.chunk_tokens == UNCHUNKED
    reason = "batching.chunk_tokens = -1" if whole else "prompts may be prefilled in chunks"
    return ResolvedValue(whole, reason)


def resolve_step_tokens(
    settings: Settings, context_tokens: int, *, whole: bool
) -> ResolvedValue[int]:
    batching = settings.batching
    # A prompt that is never chunked takes a whole forward pass regardless of the limit; if the
    # settings allow more prompt tokens than that, several prompts may share the pass.
    prompts = max(context_tokens, batching.fill_tokens or 0)
    if whole and prompts > batching.tokens_max:
        longest = prompts == context_tokens
        return ResolvedValue(prompts, LONGEST if longest else "batching.fill_tokens")
    return ResolvedValue(batching.tokens_max, "batching.tokens_max")


def resolve_chunk_tokens(
    settings: Settings, device: HostDevice, dtype: Dtype, context_tokens: int, *, whole: bool
) -> ResolvedValue[int]:
    batching = settings.batching
    if whole:
        return ResolvedValue(context_tokens, LONGEST)
    if batching.chunk_tokens is not None:
        return ResolvedValue(batching.chunk_tokens, "batching.chunk_tokens")
    tiles = _has_tiles(device, dtype)
    enough = TILES_CHUNK_TOKENS if tiles else CPU_CHUNK_TOKENS
    if device.kind == "cpu" and batching.tokens_max > enough:
        faster = "little faster on AMX" if tiles else "no faster on a CPU"
        return ResolvedValue(enough, f"longer chunks are {faster} and delay decodes")
    return ResolvedValue(batching.tokens_max, "batching.tokens_max")


def resolve_alone_tokens(
    settings: Settings,
    device: HostDevice,
    dtype: Dtype,
    chunk: ResolvedValue[int],
    step_tokens: int,
) -> ResolvedValue[int]:
    """Tokens of a prefill chunk while there is no other request."""
    left_open = settings.batching.chunk_tokens is None
    if left_open and chunk.value < step_tokens and _has_tiles(device, dtype):
        return ResolvedValue(step_tokens, "a step's: longer chunks are faster on AMX")
    return ResolvedValue(chunk.value, "as beside other requests")


def resolve_fill_tokens(
    settings: Settings, device: HostDevice, dtype: Dtype, step_tokens: int, pooling: Pooling | None
) -> ResolvedValue[int]:
    batching = settings.batching
    if batching.fill_tokens is not None:
        return ResolvedValue(batching.fill_tokens, "batching.fill_tokens")
    if device.kind == "cpu":
        enough, reason = CPU_FILL_TOKENS, "saturates a CPU; more would delay the first requests"
        if _has_tiles(device, dtype):
            enough, reason = TILES_FILL_TOKENS, "saturates AMX tiles; the last requests wait less"
        if pooling is not None:
            enough, reason = POOLING_FILL_TOKENS, "no decode waits, and steps are shared by more"
        if step_tokens > enough:
            return ResolvedValue(enough, reason)
    return ResolvedValue(step_tokens, "as many as fit into a step")


def _has_tiles(device: HostDevice, dtype: Dtype) -> bool:
    # Tiles multiply bf16 alone: float32 is computed as without them.
    return dtype is Dtype.BFLOAT16 and device.arithmetic.get("isa") == TILES_ISA


def resolve_mixed(settings: Settings) -> ResolvedValue[bool]:
    if not settings.batching.mixed:
        return ResolvedValue(value=False, reason="batching.mixed")
    reason = "prefill reads all weights anyway: decodes in the same batch are almost free"
    return ResolvedValue(value=True, reason=reason)


def resolve_overlap(
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


def resolve_running_max(
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
