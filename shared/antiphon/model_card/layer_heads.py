"""The heads of each layer, in models whose layers differ in them or share keys and values.

Read by the plan and by the declaration of the family.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.config.errors import ConfigError

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
SLIDING, FULL = "sliding_attention", "full_attention"
SLIDING_RUN = 6
"""Of so many layers the last one has full attention, if a config does not say which ones do."""
GEMMA3N, GEMMA3N_RUN = "gemma3n_text", 5
"""The `model_type` of Gemma 3n, and the same of its layers."""


class LayerHeads(msgspec.Struct, frozen=True, kw_only=True):
    """The heads of one layer."""

    kv_heads: int
    head_size: int
    kv_layer: int | None = None
    """The layer before it whose keys and values it attends to; None: it has its own."""
    values_are_keys: bool = False
    """Whether values are projected by the weights of keys."""

    @property
    def cached(self) -> int:
        """Key-value heads that it caches."""
        return self.kv_heads if self.kv_layer is None else 0

    @property
    def projected(self) -> int:
        """Key-value heads that have weights, keys and values apart."""
        return self.cached * (1 if self.values_are_keys else 2)


class OwnHeads(msgspec.Struct, frozen=True):
    """What a config says of the heads of one layer."""

    head_dim: Size | None = None
    num_key_value_heads: Size | None = None


class HeadFields(msgspec.Struct):
    """The fields of config.json that say it."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    layer_types: tuple[str, ...] | None = None
    per_layer_config: dict[str, OwnHeads] | None = None
    global_head_dim: Size | None = None
    num_global_key_value_heads: Size | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    model_type: str = ""

    @property
    def differs(self) -> bool:
        """Whether layers may differ in their heads, or share them: all here is of such models."""
        own = self.per_layer_config is not None or self.global_head_dim is not None
        return own or self.model_type == GEMMA3N

    def types(self) -> tuple[str, ...]:
        """The type of each layer; but for Gemma 3n, the last one always has full attention.

        Raises:
            ConfigError: `layer_types` names another number of them.
        """
        count, as_said = self.num_hidden_layers, self.model_type == GEMMA3N
        run = GEMMA3N_RUN if as_said else SLIDING_RUN
        types = self.layer_types or tuple(
            FULL if (layer + 1) % run == 0 else SLIDING for layer in range(count)
        )
        if len(types) != count:
            raise ConfigError(f"config.json: layer_types names {len(types)} of {count} layers")
        return types if as_said else (*types[:-1], FULL)

    def layers(self) -> tuple[LayerHeads, ...]:
        """The heads of each layer.

        The last `num_kv_shared_layers` attend to the keys and values of the last layer of their
        type that has its own.

        Raises:
            ConfigError: No layer of a type has its own.
        """
        types = self.types()
        own = len(types) - self.num_kv_shared_layers
        if not 0 <= own <= len(types) or set(types[own:]) - set(types[:own]):
            raise ConfigError(
                f"config.json: num_kv_shared_layers = {self.num_kv_shared_layers}: no layer before"
                " them has keys and values of their type"
            )
        last = {kind: layer for layer, kind in enumerate(types[:own])}
        return tuple(
            self._heads(layer, kind, None if layer < own else last[kind])
            for layer, kind in enumerate(types)
        )

    def _heads(self, layer: int, kind: str, kv_layer: int | None) -> LayerHeads:
        own = self._own(layer, kind)
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        size = self.head_dim or self.hidden_size // self.num_attention_heads
        return LayerHeads(
            kv_heads=own.num_key_value_heads or kv_heads,
            head_size=own.head_dim or size,
            kv_layer=kv_layer,
            values_are_keys=self.attention_k_eq_v and kind == FULL,
        )

    def _own(self, layer: int, kind: str) -> OwnHeads:
        if self.per_layer_config is not None:
            return self.per_layer_config.get(str(layer), OwnHeads())
        if kind != FULL:
            return OwnHeads()
        heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return OwnHeads(head_dim=self.global_head_dim, num_key_value_heads=heads)


def unread_keys(heads: tuple[LayerHeads, ...]) -> tuple[str, ...]:
    """Prefixes of tensors of keys and values that files have of layers that use those of others."""
    sharing = [layer for layer, each in enumerate(heads) if each.kv_layer is not None]
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return tuple(f"model.layers.{layer}.self_attn.{name}." for name in names for layer in sharing)
