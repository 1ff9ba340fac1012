"""Sizes of experts (MoE) and latent attention (MLA) from config.json, for the memory plan."""

from __future__ import annotations

import msgspec


class SparseFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all families; a dense model has none of them."""

    num_experts: int | None = None
    num_experts_per_tok: int = 1
    moe_intermediate_size: int | None = None
    n_shared_experts: int = 0
    shared_expert_intermediate_size: int | None = None
    first_k_dense_replace: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: int = 1
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int | None = None
    num_nextn_predict_layers: int = 0
    """Multi-token prediction layers after the last layer, which are not loaded."""


class ExpertsCard(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a model.

    Attributes:
        layers: Number of layers with experts; the others have dense blocks.
        count: Experts per layer.
        chosen: Experts per token.
        width: Width of one expert.
        shared_width: Width of the shared experts; 0 without any.
        shared_gated: Whether the shared experts have a gate of their own.
    """

    layers: int
    count: int
    chosen: int
    width: int
    shared_width: int
    shared_gated: bool

    def layer_parameters(self, hidden: int) -> int:
        """Parameters of one layer's feed-forward matrices."""
        blocks = 3 * (self.count * self.width + self.shared_width)
        return hidden * (blocks + self.count + int(self.shared_gated))

    def router_parameters(self, hidden: int) -> int:
        """Parameters of all routers."""
        return self.layers * self.count * hidden


class LatentCard(msgspec.Struct, frozen=True, kw_only=True):
    """Latent attention (MLA).

    Attributes:
        latent: Size of a latent (KV LoRA rank).
        content: Size of a head's keys without RoPE, computed from the latent.
        position: Size of the keys with RoPE, shared by all heads.
        value: Size of a head's values.
        query: Query LoRA rank; None without one.
    """

    latent: int
    content: int
    position: int
    value: int
    query: int | None

    @property
    def cached_width(self) -> int:
        """Elements per token and layer in the cache."""
        return self.latent + self.position

    def layer_parameters(self, hidden: int, heads: int) -> int:
        """Parameters of one layer's attention matrices."""
        key = self.content + self.position
        queries = hidden * heads * key
        if self.query is not None:
            queries = self.query * (hidden + heads * key)
        return (
            queries
            + hidden * self.cached_width
            + self.up_parameters(heads)
            + heads * self.value * hidden
        )

    def up_parameters(self, heads: int) -> int:
        """Parameters of the up-projection, of which a second copy is stored in another layout."""
        return self.latent * heads * (self.content + self.value)

    def token_numbers(self, heads: int) -> int:
        """Approximate elements of a token's queries and attention outputs in one layer."""
        return heads * (2 * self.cached_width + 2 * (self.content + self.position) + 2 * self.value)


def experts_of(fields: SparseFields, layers: int, dense_width: int) -> ExpertsCard | None:
    """The experts of a model with `layers` layers; None for a dense model."""
    if not fields.num_experts:
        return None
    sparse = [
        layer
        for layer in range(fields.first_k_dense_replace, layers)
        if layer not in fields.mlp_only_layers
        and (layer + 1) % fields.decoder_sparse_step == 0
        and (layer + 1) % fields.interleave_moe_layer_step == 0
    ]
    if fields.moe_layers is not None:
        sparse = list(fields.moe_layers)
    width = fields.moe_intermediate_size or dense_width
    shared = fields.shared_expert_intermediate_size
    return ExpertsCard(
        layers=len(sparse),
        count=fields.num_experts,
        chosen=fields.num_experts_per_tok,
        width=width,
        shared_width=shared or fields.n_shared_experts * width,
        shared_gated=shared is not None,
    )


def latent_of(fields: SparseFields) -> LatentCard | None:
    """The latent attention of a model; None if it caches keys and values."""
    if fields.kv_lora_rank is None:
        return None
    return LatentCard(
        latent=fields.kv_lora_rank,
        content=fields.qk_nope_head_dim,
        position=fields.qk_rope_head_dim,
        value=fields.v_head_dim or 0,
        query=fields.q_lora_rank,
    )
