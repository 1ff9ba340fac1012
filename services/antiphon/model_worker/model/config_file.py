"""config.json of a model folder, as Hugging Face writes it: the fields that shape a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.config.errors import ConfigError
from antiphon.config.model_files import files_at
from antiphon.kernels.rotary import LinearScaling, Llama3Scaling, Rotary, RotaryScaling
from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from antiphon.config.model_files import Place

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class RopeField(msgspec.Struct, frozen=True):
    """`rope_scaling` (`type` in old files), or `rope_parameters`, which carries theta too."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None

    @property
    def kind(self) -> str:
        """`default`, or the name of a scaling."""
        return self.rope_type or self.type or "default"


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """The fields we read; unknown ones are the business of other programs."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    max_position_embeddings: Size
    architectures: tuple[str, ...] = ()
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeField | None = None
    rope_parameters: RopeField | None = None
    use_sliding_window: bool = False
    sliding_window: Size | None = None
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    quantization_config: msgspec.Raw | None = None
    dtype: str | None = None
    torch_dtype: str | None = None

    @property
    def kv_heads(self) -> int:
        """Key-value heads; as many as query heads where the file is silent."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Numbers in a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def check(self, *, activation: str) -> None:
        """Refuse what would be served wrongly.

        Raises:
            ModelLoadError: Names the field and what is supported.
        """
        if self.hidden_act != activation:
            raise ModelLoadError(
                f"config.json: hidden_act {self.hidden_act!r} is not supported: use {activation!r}"
            )
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ModelLoadError(
                f"config.json: layer_types names {len(self.layer_types)} of"
                f" {self.num_hidden_layers} layers"
            )
        if self.quantization_config is not None:
            raise ModelLoadError("config.json: quantization_config: no quantized weights are read")
        if self.num_attention_heads % self.kv_heads:
            raise ModelLoadError(
                f"config.json: {self.num_attention_heads} attention heads do not share"
                f" {self.kv_heads} key-value heads evenly"
            )

    def rotary(self) -> Rotary:
        """The rotation of positions.

        Raises:
            ModelLoadError: A scaling that we do not have.
        """
        field = self.rope_parameters or self.rope_scaling or RopeField()
        if field.partial_rotary_factor != 1.0:
            raise ModelLoadError("config.json: partial_rotary_factor other than 1 is not supported")
        base = field.rope_theta or self.rope_theta
        return Rotary(self.head_size, base, self._scaling(field))

    def _scaling(self, field: RopeField) -> RotaryScaling | None:
        match field.kind:
            case "default":
                return None
            case "linear":
                return LinearScaling(field.factor)
            case "llama3":
                return Llama3Scaling(
                    field.factor,
                    field.low_freq_factor,
                    field.high_freq_factor,
                    field.original_max_position_embeddings or self.max_position_embeddings,
                )
            case kind:
                raise ModelLoadError(
                    f"config.json: rope scaling {kind!r} is not supported:"
                    " there are default, linear and llama3"
                )


def read_config(place: Place) -> ConfigFile:
    """Read config.json, and what overrides it.

    Raises:
        ModelLoadError: It is missing, or a field is missing or of a wrong type.
    """
    files = files_at(place)
    try:
        return msgspec.json.decode(files.config(), type=ConfigFile)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{files.folder / 'config.json'}: {error}") from error
