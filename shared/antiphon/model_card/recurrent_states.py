"""Recurrent states of a model's layers, by its config.json."""

from __future__ import annotations

import msgspec

from antiphon.model_card.json_file import parse_json


class RecurrentStates(msgspec.Struct, frozen=True):
    layers: int
    """Number of layers with a state."""
    attending: int
    """Number of layers with keys and values; the others cache nothing per token."""
    convolved: int
    """Elements of a layer's convolution state, in the model's dtype."""
    matrices: int
    """Elements of its recurrent state, in float32."""
    channels: int
    """Input channels of its convolution."""
    parameters: int
    """Parameters of its projections and its convolution."""
    gated: bool = False
    """Whether attention in the other layers projects output gates with its queries."""

    def state_bytes(self, item_bytes: int) -> int:
        """Bytes of one state in all layers, with `item_bytes` per element of the model's dtype."""
        return self.layers * (self.convolved * item_bytes + self.matrices * 4)

    def activation_bytes(self, tokens: int) -> int:
        """Approximate bytes of one layer in a forward pass, besides its linear layers."""
        return tokens * 16 * self.channels


def read_states(architecture: str, config: bytes) -> RecurrentStates | None:
    kind = _KINDS.get(architecture)
    return None if kind is None else parse_json(config, kind, "config.json").states()


class _FalconH1(msgspec.Struct):
    hidden_size: int
    num_hidden_layers: int
    mamba_n_heads: int
    mamba_d_head: int
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4

    def states(self) -> RecurrentStates:
        """All layers have attention and a state."""
        width = self.mamba_n_heads * self.mamba_d_head
        channels = width + 2 * self.mamba_n_groups * self.mamba_d_state
        projected = 2 * width + channels + self.mamba_n_heads
        return RecurrentStates(
            layers=self.num_hidden_layers,
            attending=self.num_hidden_layers,
            convolved=(self.mamba_d_conv - 1) * channels,
            matrices=width * self.mamba_d_state,
            channels=channels,
            parameters=self.hidden_size * projected + channels * self.mamba_d_conv,
        )


class _Qwen3Next(msgspec.Struct):
    hidden_size: int
    num_hidden_layers: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    full_attention_interval: int = 4
    layer_types: tuple[str, ...] | None = None

    def states(self) -> RecurrentStates:
        """Each layer has either attention or a state."""
        attending = self.num_hidden_layers // self.full_attention_interval
        if self.layer_types is not None:
            attending = self.layer_types.count("full_attention")
        values = self.linear_num_value_heads * self.linear_value_head_dim
        channels = 2 * self.linear_num_key_heads * self.linear_key_head_dim + values
        projected = channels + 2 * values + 2 * self.linear_num_value_heads
        return RecurrentStates(
            layers=self.num_hidden_layers - attending,
            attending=attending,
            convolved=(self.linear_conv_kernel_dim - 1) * channels,
            matrices=values * self.linear_key_head_dim,
            channels=channels,
            parameters=self.hidden_size * projected + channels * self.linear_conv_kernel_dim,
            gated=True,
        )


_KINDS: dict[str, type[_FalconH1 | _Qwen3Next]] = {
    "FalconH1ForCausalLM": _FalconH1,
    "Qwen3NextForCausalLM": _Qwen3Next,
}
