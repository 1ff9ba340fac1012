"""Memory budget of a worker, computed before anything is loaded."""

from __future__ import annotations

import msgspec

from antiphon.config.model import Dtype, LinearFormat
from antiphon.model_card.card import ModelCard, item_bytes
from antiphon.model_card.tasks import Task

INT8_FORMATS = (LinearFormat.INT8, LinearFormat.INT8_DYNAMIC)
"""Formats of linear layers that take one byte per weight."""
LOGIT_BYTES = 4
"""Logits are float32 for every model."""
LOGIT_COPIES = 3
"""The logits, the processed logits, and the sorted or cumulated copy for sampling."""
EXPANDED_BYTES_MAX = 512 * 1024**2
"""Maximum size of keys and values expanded from latents, with the buffers of the expansion."""
PROMPT_LOGITS_BYTES_MAX = 32 * 1024**2
"""Maximum memory of prompt logits at a time: logprobs of a long prompt are computed in chunks."""


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

    @property
    def rest(self) -> int:
        """Memory left for the cache; negative if there is too little for a single step."""
        return self.free - self.weights - self.activations - self.logits - self.scored

    def __str__(self) -> str:
        return (
            f"{gib(self.free)} free, weights {gib(self.weights)}, "
            f"activations {gib(self.activations)}, logits {gib(self.logits)}, "
            f"prompt logits {gib(self.scored)}"
        )


def weight_bytes(
    card: ModelCard,
    dtype: Dtype,
    linear: LinearFormat,
    *,
    quantized: LinearFormat = LinearFormat.PLAIN,
    count: int = 0,
) -> int:
    """Bytes of the parameters; one per int8 weight, except for an embedding that is not the head.

    `count` of them are quantized in the checkpoint: stored as `quantized`, the others as `linear`.
    """
    item = item_bytes(dtype)
    plain = card.weights.count - count
    stored = count * (1 if quantized in INT8_FORMATS else item) + _beside_bytes(card, dtype)
    if linear not in INT8_FORMATS:
        return stored + plain * item
    looked_up = 0 if card.tied else card.vocabulary_size * card.hidden_size
    return stored + plain - looked_up + looked_up * item


def _beside_bytes(card: ModelCard, dtype: Dtype) -> int:
    """Bytes beyond the dtype's: wider routers, and the second copy of MLA up-projections."""
    beside = 0
    if card.experts is not None:
        wider = item_bytes(Dtype.FLOAT32) - item_bytes(dtype)
        beside += card.experts.router_parameters(card.hidden_size) * wider
    if card.latent is not None:
        beside += card.layers * card.latent.up_parameters(card.heads) * item_bytes(dtype)
    return beside


def activation_bytes(card: ModelCard, dtype: Dtype, tokens: int) -> int:
    """Approximate peak of the activations of a forward pass of `tokens` tokens.

    Residual and normalized stream, and the fused projections of a layer with their results. Both
    blocks count, though one follows the other: the allocator caches the memory that the first one
    frees, and its size does not match that of the second one.
    """
    attention, expanded = (2 * card.heads + 4 * card.kv_heads) * card.head_size, 0
    if card.latent is not None:
        attention, expanded = card.latent.token_numbers(card.heads), EXPANDED_BYTES_MAX
    width = 3 * card.hidden_size + attention + _feed_forward_numbers(card)
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
    if card.task is not Task.GENERATE:
        return 0
    return LOGIT_COPIES * rows * card.vocabulary_size * LOGIT_BYTES


def prompt_logits_bytes(card: ModelCard, tokens: int) -> int:
    if card.task is not Task.GENERATE:
        return 0
    row = card.vocabulary_size * LOGIT_BYTES
    return LOGIT_COPIES * row * min(tokens, prompt_logits_rows(card.vocabulary_size))


def prompt_logits_rows(vocabulary_size: int, bytes_max: int = PROMPT_LOGITS_BYTES_MAX) -> int:
    """Number of prompt tokens whose logprobs are computed at a time."""
    return max(1, bytes_max // (vocabulary_size * LOGIT_BYTES))


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.2f} GiB"
