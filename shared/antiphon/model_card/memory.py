"""What a worker's memory goes to, before anything is loaded."""

from __future__ import annotations

import msgspec

from antiphon.config.model import Dtype, LinearFormat
from antiphon.model_card.card import ModelCard, item_bytes
from antiphon.model_card.tasks import Task

INT8_FORMATS = (LinearFormat.INT8, LinearFormat.INT8_DYNAMIC)
"""How linears are kept that take a byte a weight."""
LOGIT_BYTES = 4
"""Logits are float32, whatever the model is."""
LOGIT_COPIES = 3
"""The logits, what filters make of them, and the sorted or summed copy that is drawn from."""
EXPANDED_BYTES_MAX = 512 * 1024**2
"""What keys and values that are made of latents take at most, with what they are made by."""
PROMPT_LOGITS_BYTES_MAX = 32 * 1024**2
"""Most memory that the logits of prompt tokens take at once: a long prompt is scored in pieces."""


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How the free memory is divided, in bytes. What is left may go to the cache.

    Attributes:
        free: What this process may use, within the limits of its containers.
        activations: Of the largest step.
        logits: Of the most rows that draw a token in one step.
        scored: Logits of the prompt tokens that are told of at once.
    """

    free: int
    weights: int
    activations: int
    logits: int
    scored: int

    @property
    def rest(self) -> int:
        """What the cache may share; negative if there is too little for a single step."""
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
    """What the parameters take; rounded ones a byte each, but for an embedding that is no head.

    Args:
        card: Of the model.
        dtype: Of its plain numbers.
        linear: How linears are kept that the checkpoint stores in plain numbers.
        quantized: How those are kept that it does not.
        count: Weights in these.
    """
    item = item_bytes(dtype)
    plain = card.weights.count - count
    stored = count * (1 if quantized in INT8_FORMATS else item) + _beside_bytes(card, dtype)
    if linear not in INT8_FORMATS:
        return stored + plain * item
    looked_up = 0 if card.tied else card.vocabulary_size * card.hidden_size
    return stored + plain - looked_up + looked_up * item


def _beside_bytes(card: ModelCard, dtype: Dtype) -> int:
    """What is kept beside a number format's own: wider routers, and latents' second copy."""
    beside = 0
    if card.experts is not None:
        wider = item_bytes(Dtype.FLOAT32) - item_bytes(dtype)
        beside += card.experts.router_parameters(card.hidden_size) * wider
    if card.latent is not None:
        beside += card.layers * card.latent.up_parameters(card.heads) * item_bytes(dtype)
    return beside


def activation_bytes(card: ModelCard, dtype: Dtype, tokens: int) -> int:
    """About the most that one pass of `tokens` tokens holds at once.

    Residual and normalised stream, and the fused projections of a layer with their results. Both
    blocks count, though one follows the other: what the first gives back the allocator keeps, and
    it is not of the size that the second asks for.
    """
    attention, expanded = (2 * card.heads + 4 * card.kv_heads) * card.head_size, 0
    if card.latent is not None:
        attention, expanded = card.latent.token_numbers(card.heads), EXPANDED_BYTES_MAX
    width = 3 * card.hidden_size + attention + _feed_forward_numbers(card)
    recurrent = 0 if card.states is None else card.states.activation_bytes(tokens)
    return tokens * item_bytes(dtype) * width + expanded + recurrent


def _feed_forward_numbers(card: ModelCard) -> int:
    """Of a token: what enters and leaves its experts, and their blocks if all take the same."""
    dense, experts = 4 * card.mlp_width, card.experts
    if experts is None:
        return dense
    moved = 4 * experts.chosen * card.hidden_size
    return max(dense, moved + 4 * experts.width + 4 * experts.shared_width)


def logits_bytes(card: ModelCard, rows: int) -> int:
    """The most that sampling a token for each of `rows` rows takes."""
    if card.task is not Task.GENERATE:
        return 0
    return LOGIT_COPIES * rows * card.vocabulary_size * LOGIT_BYTES


def prompt_logits_bytes(card: ModelCard, tokens: int) -> int:
    """The most that telling of the prompt takes in a step of `tokens` tokens."""
    if card.task is not Task.GENERATE:
        return 0
    row = card.vocabulary_size * LOGIT_BYTES
    return LOGIT_COPIES * row * min(tokens, prompt_logits_rows(card.vocabulary_size))


def prompt_logits_rows(vocabulary_size: int, bytes_max: int = PROMPT_LOGITS_BYTES_MAX) -> int:
    """Tokens of prompts that are told of at once."""
    return max(1, bytes_max // (vocabulary_size * LOGIT_BYTES))


def gib(size_bytes: int) -> str:
    """A size as people read it."""
    return f"{size_bytes / 1024**3:.2f} GiB"
