"""Token limits of one step: total, and per prefill chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from antiphon.config.settings import Settings
    from antiphon.model_card.card import ModelCard
    from antiphon.resolve.device import HostDevice

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
TILES_ISA = "amx"
BIDIRECTIONAL = "attention is bidirectional"


class StepLimits(msgspec.Struct, frozen=True):
    """The resolved limits of steps; the names are those of the plan."""

    step_tokens: ResolvedValue[int]
    whole_prompts: ResolvedValue[bool]
    chunk_tokens: ResolvedValue[int]
    fill_tokens: ResolvedValue[int]
    mixed: ResolvedValue[bool]
    prefix: ResolvedValue[bool]


def resolve_step_limits(
    settings: Settings, card: ModelCard, device: HostDevice, context_tokens: int
) -> StepLimits:
    """Resolve the limits of one step for a model with a context of `context_tokens`."""
    whole = _whole(settings, card)
    step = _step(settings, context_tokens, whole=whole.value)
    return StepLimits(
        step_tokens=step,
        whole_prompts=whole,
        chunk_tokens=_chunk(settings, device, context_tokens, whole=whole.value),
        fill_tokens=_fill(settings, device, step.value),
        mixed=_mixed(settings),
        prefix=_prefix(settings, card),
    )


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
        longest = "the longest prompt, since chunked prefill is off"
        return ResolvedValue(
            prompts, longest if prompts == context_tokens else "batching.fill_tokens"
        )
    return ResolvedValue(batching.tokens_max, "batching.tokens_max")


def _chunk(
    settings: Settings, device: HostDevice, context_tokens: int, *, whole: bool
) -> ResolvedValue[int]:
    batching = settings.batching
    if whole:
        return ResolvedValue(context_tokens, "the longest prompt, since chunked prefill is off")
    if batching.chunk_tokens is not None:
        return ResolvedValue(batching.chunk_tokens, "batching.chunk_tokens")
    if device.kind == "cpu" and batching.tokens_max > CPU_CHUNK_TOKENS:
        reason = "longer chunks are no faster on a CPU and delay decodes"
        return ResolvedValue(CPU_CHUNK_TOKENS, reason)
    return ResolvedValue(batching.tokens_max, "batching.tokens_max")


def _fill(settings: Settings, device: HostDevice, step_tokens: int) -> ResolvedValue[int]:
    batching = settings.batching
    if batching.fill_tokens is not None:
        return ResolvedValue(batching.fill_tokens, "batching.fill_tokens")
    if device.kind == "cpu":
        enough, reason = CPU_FILL_TOKENS, "saturates a CPU; more would delay the first requests"
        if device.arithmetic.get("isa") == TILES_ISA:
            enough, reason = TILES_FILL_TOKENS, "saturates AMX tiles; the last requests wait less"
        if step_tokens > enough:
            return ResolvedValue(enough, reason)
    return ResolvedValue(step_tokens, "as many as fit into a step")


def _mixed(settings: Settings) -> ResolvedValue[bool]:
    if not settings.batching.mixed:
        return ResolvedValue(value=False, reason="batching.mixed")
    reason = "prefill reads all weights anyway: decodes in the same batch are almost free"
    return ResolvedValue(value=True, reason=reason)


def _prefix(settings: Settings, card: ModelCard) -> ResolvedValue[bool]:
    if not card.causal:
        return ResolvedValue(
            value=False, reason=f"{BIDIRECTIONAL}: states of a prefix depend on the text after it"
        )
    return ResolvedValue(settings.cache.prefix, "cache.prefix")
