"""config.json of a model folder in the Hugging Face format."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from antiphon.config.errors import ConfigError
from antiphon.kernels.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    RotaryScaling,
    RotarySpec,
    YarnScaling,
)
from antiphon.model_card.config_json import check_shape
from antiphon.model_card.files import ModelLocation, files_at
from antiphon.model_worker.model.errors import ModelLoadError, UnsupportedVariant

if TYPE_CHECKING:
    from antiphon.kernels.activation import ActivationKind

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0)]
Part = Annotated[float, Meta(gt=0, le=1)]
"""A fraction of a head."""
KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
T = TypeVar("T")

ACTIVATIONS: dict[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}
"""By the names of transformers; three of them name the same formula."""


class RopeField(msgspec.Struct, frozen=True):
    """`rope_scaling` (`type` in old files), or `rope_parameters`, which includes theta.

    Some models have one of these for each type of layer.
    """

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Part | None = None
    factor: Positive | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: Annotated[int, Meta(ge=1)] | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    mrope_section: tuple[int, ...] = ()
    full_attention: RopeField | None = None
    sliding_attention: RopeField | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"

    def of(self, kind: str) -> RopeField:
        own = self.sliding_attention if kind == "sliding_attention" else self.full_attention
        return own or self

    def scaling(self, rotated: int, context_tokens: int, trained: int) -> RotaryScaling | None:
        """The scaling of a head's `rotated` elements; `trained` tokens were extended."""
        match self.kind:
            case "default" | "mrope":  # text alone has the same position on all axes
                return None
            case "dynamic":
                return self._dynamic(rotated, context_tokens)
            case "linear":
                return LinearScaling(self.factor or 1.0)
            case "llama3":
                return Llama3Scaling(
                    self.factor or 1.0, self.low_freq_factor, self.high_freq_factor, trained
                )
            case "yarn":
                return self._yarn(self.factor or context_tokens / trained, trained)
            case "longrope" | "su":
                return self._long(rotated, self.factor or context_tokens / trained, trained)
            case kind:
                raise ModelLoadError(
                    f"config.json: rope scaling {kind!r} is not supported:"
                    f" there are {', '.join(KINDS)}"
                )

    def _dynamic(self, rotated: int, trained: int) -> DynamicScaling:
        if rotated <= 2:  # the exponent of the base divides by rotated - 2
            raise ModelLoadError("config.json: dynamic RoPE scaling needs over 2 rotated elements")
        return DynamicScaling(self.factor or 1.0, trained)

    def _yarn(self, factor: float, trained: int) -> YarnScaling:
        amplitude = self.attention_factor
        if amplitude is None and self.mscale and self.mscale_all_dim:
            amplitude = mscale(factor, self.mscale) / mscale(factor, self.mscale_all_dim)
        return YarnScaling(
            factor,
            trained,
            self.beta_fast or 32.0,
            self.beta_slow or 1.0,
            mscale(factor, 1.0) if amplitude is None else amplitude,
            self.truncate,
        )

    def _long(self, rotated: int, factor: float, trained: int) -> LongScaling:
        # The context length has selected one list by now, see `longrope_factors` of model_card;
        # not with RoPE by layer type, which uses the model's maximum context length.
        factors = self.long_factor if factor > 1.0 else self.short_factor
        if len(factors) != rotated // 2:
            raise ModelLoadError(
                f"config.json: rope scaling has {len(factors)} factors for {rotated // 2} pairs"
            )
        amplitude = self.attention_factor
        if amplitude is None:
            amplitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
        return LongScaling(factors, amplitude)


def mscale(factor: float, by: float) -> float:
    """YaRN's multiplier of scores. Source: Peng et al. 2023, arXiv:2309.00071, section 3.4."""
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that many families share."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size | tuple[Size, ...] | None = None
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
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def width(self) -> int:
        """Width of the feed-forward block; defaults to four times the hidden size.

        Raises:
            ModelLoadError: Layers have widths of their own; the families that take them read
                `widths`.
        """
        if isinstance(self.intermediate_size, tuple):
            raise ModelLoadError(
                "config.json: intermediate_size: one number is supported here, not one a layer"
            )
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of the feed-forward block of each layer."""
        if isinstance(self.intermediate_size, tuple):
            return self.intermediate_size
        return (self.width,) * self.num_hidden_layers

    @property
    def labels(self) -> int:
        """Labels of a classifier; defaults to two, as in transformers."""
        return len(self.id2label or ()) or self.num_labels or 2

    @property
    def context_tokens(self) -> int:
        """Maximum context length; with dynamic RoPE it exceeds the trained length."""
        field, trained = self.rope.of("full_attention"), self.max_position_embeddings
        return int(trained * (field.factor or 1.0)) if field.kind == "dynamic" else trained

    @property
    def rope(self) -> RopeField:
        return self.rope_parameters or self.rope_scaling or RopeField()

    @property
    def activation(self) -> ActivationKind:
        return activation_of(self.hidden_act, "hidden_act")

    def family_fields(self, type_: type[T]) -> T:
        """Decode the fields that only one family has."""
        try:
            return msgspec.json.decode(self.raw, type=type_)
        except msgspec.DecodeError as error:
            raise ModelLoadError(f"config.json: {error}") from error

    def check(self) -> None:
        """Refuse contradictory fields, independent of the family."""
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ModelLoadError(
                f"config.json: layer_types names {len(self.layer_types)} of"
                f" {self.num_hidden_layers} layers"
            )
        if len(self.widths) != self.num_hidden_layers:
            raise ModelLoadError(
                f"config.json: intermediate_size names {len(self.widths)} of"
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
        """The attention window of each layer, by `layer_types`; None is full attention."""
        kinds = self.layer_types or ("full_attention",) * self.num_hidden_layers
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelLoadError(f"config.json: layer_types: {kind!r} is not supported")
        if "sliding_attention" in kinds and self.sliding_window is None:
            raise ModelLoadError("config.json: sliding_window: layers need one and it is not set")
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in kinds)

    def rotary(self, kind: str = "full_attention") -> RotarySpec:
        field, context_tokens = self.rope.of(kind), self.max_position_embeddings
        part = field.partial_rotary_factor or self.partial_rotary_factor
        base = field.rope_theta or self.rope_theta
        if field.kind == "proportional":
            scaling = ProportionalScaling(int(part * self.head_size // 2), field.factor or 1.0)
            return RotarySpec(self.head_size, base, scaling)
        rotated = int(self.head_size * part)
        trained = (
            field.original_max_position_embeddings
            or self.original_max_position_embeddings
            or context_tokens
        )
        scaling = field.scaling(rotated, context_tokens, trained)
        return RotarySpec(rotated, base, scaling)


def activation_of(name: str, field: str) -> ActivationKind:
    """The activation that transformers has under this name; an error names the field."""
    if name not in ACTIVATIONS:
        raise UnsupportedVariant(
            f"config.json: {field} {name!r} is not supported: there are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def read_config(place: ModelLocation) -> ConfigFile:
    """Read config.json and its overrides."""
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
