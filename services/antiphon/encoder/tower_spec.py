"""The shapes of vision towers of squares, by config.json."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, field

from antiphon.config.errors import ConfigError
from antiphon.encoder.activations import VisionActivation
from antiphon.encoder.preprocess import BICUBIC, BILINEAR, LANCZOS, Channels
from antiphon.model_card.config_json import parse_json, read_json
from antiphon.model_card.untaken_media import untaken_reason
from antiphon.model_card.vision.canvas_tiles import LLAMA4, read_canvas_tiling
from antiphon.model_card.vision.frame_videos import INTERN
from antiphon.model_card.vision.padded_tiles import ANYRES, read_anyres, read_anyres_fields
from antiphon.model_card.vision.squares import GEMMA3
from antiphon.model_card.vision.stacked_tiles import read_aspect_tiling
from antiphon.model_card.vision.tiles import IDEFICS, read_tiling
from antiphon.model_card.vision.tower_fields import FeatureFields, SquareTower
from antiphon.model_card.vision.vision_card import VISION_TYPES

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.model_card.vision.canvas_tiles import CanvasTiling
    from antiphon.model_card.vision.padded_tiles import AnyresTiling
    from antiphon.model_card.vision.stacked_tiles import AspectTiling
    from antiphon.model_card.vision.tiles import Tiling

Size = Annotated[int, Meta(ge=1)]


class VisionFamily(StrEnum):
    CLIP = "clip"
    SIGLIP = "siglip"
    INTERN = "internvl"
    LLAMA4 = "llama4"


class VisionTowerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a tower, as in config.json. Missing fields have CLIP's defaults.

    `mean`, `std`, `filter` and `crops` (to a square) are the family's defaults for preprocessing,
    whose results are rounded with `bfloat16`. `read_tiling` reads how images are cut to many
    frames. The class token is in front of the patches, or with `class_last` behind them; the
    weight of patches is that of a convolution, or with `flat_patches` a matrix.
    """

    family: ClassVar = VisionFamily.CLIP
    mean: ClassVar[Channels] = (0.48145466, 0.4578275, 0.40821073)
    std: ClassVar[Channels] = (0.26862954, 0.26130258, 0.27577711)
    crops: ClassVar = True
    has_class: ClassVar = True
    class_last: ClassVar = False
    patch_bias: ClassVar = False
    flat_patches: ClassVar = False
    norm_before: ClassVar = True
    bfloat16: ClassVar = False
    scales: ClassVar = False
    by_place: ClassVar = False
    filter: ClassVar = BICUBIC
    hidden: Size = field(name="hidden_size", default=768)
    intermediate: Size = field(name="intermediate_size", default=3072)
    layers: Size = field(name="num_hidden_layers", default=12)
    heads: Size = field(name="num_attention_heads", default=12)
    image_size: Size = 224
    patch_size: Size = 32
    num_channels: Annotated[int, Meta(ge=3, le=3)] = 3
    activation: VisionActivation = field(name="hidden_act", default=VisionActivation.QUICK_GELU)
    norm_eps: float = field(name="layer_norm_eps", default=1e-5)
    feature_layer: int | None = None
    """LLaVA's `vision_feature_layer`: which of the states before, between and after the layers is
    the output; None: what the original model returns."""

    @property
    def computed(self) -> int:
        """Number of layers to compute."""
        if self.feature_layer is None:
            return self.layers
        return self.feature_layer + (self.layers + 1 if self.feature_layer < 0 else 0)

    @property
    def inner(self) -> bool:
        """Whether the output is that of a layer, without a norm after it."""
        return self.feature_layer is not None

    @property
    def norm_after(self) -> bool:
        """Whether the original model returns what a norm makes of the last layer's output."""
        return False

    @property
    def qkv_bias(self) -> bool:
        return True

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys have a norm over all heads."""
        return False

    @property
    def rms(self) -> bool:
        """Whether the layers have RMS norms, without a bias."""
        return False

    @property
    def rope_base(self) -> float | None:
        """Base of the angles by which heads are rotated, by column and row; None: they are not."""
        return None

    @staticmethod
    def read_tiling(folder: Path) -> Tiling | AspectTiling | AnyresTiling | CanvasTiling | None:
        """Read how images are cut to many frames; None: they are not."""
        del folder
        return None

    @property
    def tokens(self) -> int:
        """Rows of the embedding: the complete patches, and the class token, if there is one."""
        return (self.image_size // self.patch_size) ** 2 + self.has_class


class SiglipSpec(VisionTowerSpec, frozen=True, kw_only=True):
    """Missing fields have SigLIP's defaults."""

    family: ClassVar = VisionFamily.SIGLIP
    mean: ClassVar[Channels] = (0.5, 0.5, 0.5)
    std: ClassVar[Channels] = (0.5, 0.5, 0.5)
    crops: ClassVar = False
    has_class: ClassVar = False
    patch_bias: ClassVar = True
    norm_before: ClassVar = False
    patch_size: Size = 16
    activation: VisionActivation = field(name="hidden_act", default=VisionActivation.GELU_TANH)
    norm_eps: float = field(name="layer_norm_eps", default=1e-6)

    @property
    def norm_after(self) -> bool:
        return not self.inner


class PaddedClipSpec(VisionTowerSpec, frozen=True, kw_only=True):
    """CLIP, of images that are padded to a grid of tiles."""

    @staticmethod
    def read_tiling(folder: Path) -> AnyresTiling:
        return _padded_tiling(folder)


class PaddedSiglipSpec(SiglipSpec, frozen=True, kw_only=True):
    """SigLIP, of images that are padded to a grid of tiles."""

    @staticmethod
    def read_tiling(folder: Path) -> AnyresTiling:
        return _padded_tiling(folder)


def _padded_tiling(folder: Path) -> AnyresTiling:
    kind = read_json(folder / "config.json", _Kind).model_type
    return read_anyres(folder, kind)[0]


class Gemma3Spec(SiglipSpec, frozen=True, kw_only=True):
    """SigLIP, before Gemma 3's preprocessor, whose filter is another one."""

    filter: ClassVar = BILINEAR


class IdeficsSpec(SiglipSpec, frozen=True, kw_only=True):
    """SigLIP, with Idefics3's defaults."""

    by_place: ClassVar = True
    filter: ClassVar = LANCZOS
    hidden: Size = field(name="hidden_size", default=1152)
    heads: Size = field(name="num_attention_heads", default=16)
    patch_size: Size = 32

    @staticmethod
    def read_tiling(folder: Path) -> Tiling:
        return read_tiling(folder)


class InternSpec(VisionTowerSpec, frozen=True, kw_only=True):
    """InternVL's tower, an InternViT: class token, and outputs of blocks that are scaled."""

    family: ClassVar = VisionFamily.INTERN
    crops: ClassVar = False
    patch_bias: ClassVar = True
    norm_before: ClassVar = False
    scales: ClassVar = True
    hidden: Size = field(name="hidden_size", default=1024)
    intermediate: Size = field(name="intermediate_size", default=4096)
    layers: Size = field(name="num_hidden_layers", default=24)
    heads: Size = field(name="num_attention_heads", default=16)
    activation: VisionActivation = field(name="hidden_act", default=VisionActivation.GELU)
    norm_eps: float = field(name="layer_norm_eps", default=1e-6)
    attention_bias: bool = False
    use_qk_norm: bool = False
    norm_type: Literal["layer_norm", "rms_norm"] = "layer_norm"
    use_mean_pooling: bool = True

    @property
    def norm_after(self) -> bool:
        return not self.use_mean_pooling and not self.inner

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_norm(self) -> bool:
        return self.use_qk_norm

    @property
    def rms(self) -> bool:
        return self.norm_type == "rms_norm"

    @staticmethod
    def read_tiling(folder: Path) -> AspectTiling:
        return read_aspect_tiling(folder)


class _TowerRope(msgspec.Struct, frozen=True):
    rope_theta: Annotated[float, Meta(gt=0)] = 10_000.0


class Llama4Spec(VisionTowerSpec, frozen=True, kw_only=True):
    """Llama 4's tower: CLIP's, whose heads are rotated as in Pixtral, with the class token last."""

    family: ClassVar = VisionFamily.LLAMA4
    mean: ClassVar[Channels] = (0.5, 0.5, 0.5)
    std: ClassVar[Channels] = (0.5, 0.5, 0.5)
    crops: ClassVar = False
    class_last: ClassVar = True
    flat_patches: ClassVar = True
    bfloat16: ClassVar = True
    filter: ClassVar = BILINEAR
    intermediate: Size = field(name="intermediate_size", default=5632)
    layers: Size = field(name="num_hidden_layers", default=34)
    heads: Size = field(name="num_attention_heads", default=16)
    image_size: Size = 448
    patch_size: Size = 14
    activation: VisionActivation = field(name="hidden_act", default=VisionActivation.GELU)
    rope_theta: Annotated[float, Meta(gt=0)] = 10_000.0
    rope_parameters: _TowerRope | None = None

    @property
    def norm_after(self) -> bool:
        return True

    @property
    def rope_base(self) -> float:
        if self.rope_parameters is None:
            return self.rope_theta
        return self.rope_parameters.rope_theta

    @staticmethod
    def read_tiling(folder: Path) -> CanvasTiling:
        return read_canvas_tiling(folder)


def read_spec(folder: Path) -> VisionTowerSpec:
    """Read the config.json of a vision model, or of a model with a text and a vision tower.

    Raises:
        ConfigError: It is missing or malformed, or the tower is not supported.
    """
    file = folder / "config.json"
    kind = read_json(file, _Kind).model_type
    if kind not in _KINDS:
        raise ConfigError(f"{file}: model_type = {kind!r}: {_refusal(file)}")
    spec_type, nested = _KINDS[kind]
    if nested:
        tower = read_json(file, _Both).vision_config
        if kind in ("llava", *ANYRES):
            inner = parse_json(tower, _Kind, file).model_type
            if inner not in LLAVA_TOWERS:
                raise ConfigError(
                    f"{file}: vision_config: model_type = {inner!r}: must be one of "
                    f"{', '.join(LLAVA_TOWERS)}"
                )
            spec_type = (_PADDED if kind in ANYRES else LLAVA_TOWERS)[inner]
        if kind == INTERN:
            tower = _squared(tower, file)
        spec = parse_json(tower, spec_type, file)
    else:
        spec = read_json(file, spec_type)
    if spec.hidden % (2 * spec.heads):
        raise ConfigError(
            f"{file}: hidden_size = {spec.hidden} is not a multiple of twice "
            f"num_attention_heads = {spec.heads}"
        )
    if spec.rope_base is not None and spec.hidden % (4 * spec.heads):
        raise ConfigError(
            f"{file}: hidden_size = {spec.hidden} is not a multiple of four times "
            f"num_attention_heads = {spec.heads}"
        )
    if spec.patch_size > spec.image_size:
        raise ConfigError(
            f"{file}: patch_size = {spec.patch_size} exceeds image_size = {spec.image_size}"
        )
    if (features := read_features(folder)) is not None:
        assert isinstance(features.vision_feature_layer, int), "it was checked"
        layer: int | None = features.vision_feature_layer
        if kind == INTERN and layer in (-1, spec.layers):
            layer = None
        spec = msgspec.structs.replace(spec, feature_layer=layer)
        if not 0 <= spec.computed <= spec.layers:
            raise ConfigError(
                f"{file}: vision_feature_layer = {features.vision_feature_layer}: must be one of "
                f"{spec.layers} layers"
            )
    return spec


def _refusal(file: Path) -> str:
    """Why a model is not one of those that have towers here."""
    for architecture in read_json(file, _Named).architectures or ():
        if (reason := untaken_reason(architecture, "image")) is not None:
            return reason
    return f"must be one of {', '.join(dict.fromkeys((*_KINDS, *VISION_TYPES)))}"


def _squared(tower: msgspec.Raw, file: Path) -> msgspec.Raw:
    """The config of a tower with one number for both edges."""
    image, patch = parse_json(tower, SquareTower, f"{file}: vision_config").edges(file)
    fields = parse_json(tower, dict[str, msgspec.Raw], file)
    sizes = {"image_size": image, "patch_size": patch}
    return msgspec.Raw(msgspec.json.encode(fields | sizes))


def read_features(folder: Path) -> FeatureFields | None:
    """What a LLaVA or InternVL model takes of its tower; None for other models."""
    file = folder / "config.json"
    if (kind := read_json(file, _Kind).model_type) in ANYRES:
        return read_anyres_fields(folder, kind)
    if kind not in ("llava", INTERN):
        return None
    features = read_json(file, _LastFeature if kind == INTERN else FeatureFields)
    features.check(file)
    return features


class _LastFeature(FeatureFields, frozen=True):
    vision_feature_layer: int | list[int] = -1


class _Kind(msgspec.Struct):
    model_type: str = ""


class _Named(msgspec.Struct):
    architectures: tuple[str, ...] | None = None


class _Both(msgspec.Struct):
    vision_config: msgspec.Raw
    model_type: str = ""


_KINDS: dict[str, tuple[type[VisionTowerSpec], bool]] = {
    "clip_vision_model": (VisionTowerSpec, False),
    "clip": (VisionTowerSpec, True),
    "siglip_vision_model": (SiglipSpec, False),
    "siglip": (SiglipSpec, True),
    **dict.fromkeys(("llava", *ANYRES), (VisionTowerSpec, True)),
    GEMMA3: (Gemma3Spec, True),
    INTERN: (InternSpec, True),
    LLAMA4: (Llama4Spec, True),
    **dict.fromkeys(IDEFICS, (IdeficsSpec, True)),
}
"""By `model_type`: the spec, and whether the tower is in `vision_config`."""
LLAVA_TOWERS: dict[str, type[VisionTowerSpec]] = {
    "clip_vision_model": VisionTowerSpec,
    "siglip_vision_model": SiglipSpec,
}
_PADDED: dict[str, type[VisionTowerSpec]] = {
    "clip_vision_model": PaddedClipSpec,
    "siglip_vision_model": PaddedSiglipSpec,
}
