"""config.json of a model folder in the Hugging Face format: the fields that many families share.

A family reads the fields that only it has with `ConfigFile.family_fields`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import check_shape
from antiphon.model_card.files import files_at
from antiphon.model_worker.model.errors import ModelLoadError, UnsupportedVariant
from antiphon.model_worker.model.rope_field import Part, Positive, RopeField

if TYPE_CHECKING:
    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.rotary import RotarySpec
    from antiphon.model_card.files import ModelLocation

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
T = TypeVar("T")

ACTIVATIONS: dict[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
"""By the names of transformers; three of them name the same formula."""


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """The shared fields; other fields belong to families or to other programs."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size | None = None
    num_hidden_layers: Size
    num_attention_heads: Size
    max_position_embeddings: Size
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    layer_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rope_theta: Positive = 10000.0
    partial_rotary_factor: Part = 1.0
    rope_scaling: RopeField | None = None
    rope_parameters: RopeField | None = None
    original_max_position_embeddings: Size | None = None
    use_sliding_window: bool = False
    sliding_window: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """None after `read_config` where the size is 0 and `use_sliding_window` is not set."""
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    num_labels: Size | None = None
    id2label: dict[str, object] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    raw: bytes = b"{}"
    """The content of the file."""

    @property
    def kv_heads(self) -> int:
        """Key-value heads; defaults to the number of query heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def width(self) -> int:
        """Width of the feed-forward block; defaults to four times the hidden size."""
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def labels(self) -> int:
        """Labels of a classifier; defaults to two, as in transformers."""
        return len(self.id2label or ()) or self.num_labels or 2

    @property
    def context_tokens(self) -> int:
        """Maximum context length; with dynamic RoPE it exceeds the trained length."""
        rope = self.rope_parameters or self.rope_scaling or RopeField()
        return rope.context_tokens(self.max_position_embeddings)

    @property
    def rope_kind(self) -> str:
        """`default`, or the name of a RoPE scaling."""
        return (self.rope_parameters or self.rope_scaling or RopeField()).kind

    @property
    def activation(self) -> ActivationKind:
        """The activation of the feed-forward block.

        Raises:
            ModelLoadError: The activation is not supported.
        """
        return activation_of(self.hidden_act, "hidden_act")

    def family_fields(self, type_: type[T]) -> T:
        """Decode the fields that only one family has.

        Raises:
            ModelLoadError: A field is missing or of a wrong type.
        """
        try:
            return msgspec.json.decode(self.raw, type=type_)
        except msgspec.DecodeError as error:
            raise ModelLoadError(f"config.json: {error}") from error

    def check(self) -> None:
        """Refuse contradictory fields, independent of the family.

        Raises:
            ModelLoadError: Names the field and what is supported.
        """
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ModelLoadError(
                f"config.json: layer_types names {len(self.layer_types)} of"
                f" {self.num_hidden_layers} layers"
            )
        if self.sliding_window == 0:
            raise ModelLoadError("config.json: sliding_window: 0 with use_sliding_window")
        if self.num_attention_heads % self.kv_heads:
            raise ModelLoadError(
                f"config.json: {self.num_attention_heads} attention heads do not share"
                f" {self.kv_heads} key-value heads evenly"
            )

    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer, by `layer_types`; None is full attention.

        Raises:
            ModelLoadError: A layer is of another type, or the window has no size.
        """
        kinds = self.layer_types or ("full_attention",) * self.num_hidden_layers
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelLoadError(f"config.json: layer_types: {kind!r} is not supported")
        if "sliding_attention" in kinds and self.sliding_window is None:
            raise ModelLoadError("config.json: sliding_window: layers need one and it is not set")
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in kinds)

    def rotary(self, kind: str = "full_attention") -> RotarySpec:
        """The RoPE of layers of a type.

        Raises:
            ModelLoadError: The RoPE scaling is not supported.
        """
        field = self.rope_parameters or self.rope_scaling or RopeField()
        return field.of(kind).rotary(
            head_size=self.head_size,
            theta=self.rope_theta,
            partial=self.partial_rotary_factor,
            context_tokens=self.max_position_embeddings,
            trained_tokens=self.original_max_position_embeddings,
        )


def activation_of(name: str, field: str) -> ActivationKind:
    """The activation that transformers has under this name.

    Raises:
        UnsupportedVariant: It is not supported; names the field.
    """
    if name not in ACTIVATIONS:
        raise UnsupportedVariant(
            f"config.json: {field} {name!r} is not supported: there are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def read_config(place: ModelLocation) -> ConfigFile:
    """Read config.json and its overrides.

    Raises:
        ModelLoadError: It is missing, or a field is missing or of a wrong type.
    """
    files = files_at(place)
    try:
        raw = files.config()
        check_shape(raw, files.folder / "config.json")
        config = msgspec.json.decode(raw, type=ConfigFile)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{files.folder / 'config.json'}: {error}") from error
    if config.sliding_window == 0 and not config.use_sliding_window:
        # For a Qwen2-MoE read as "no window", transformers writes a size of 0.
        config = msgspec.structs.replace(config, sliding_window=None)
    return msgspec.structs.replace(config, raw=raw)
