"""Reads the shape of a vision tower from config.json. Does not import torch."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta, field

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

Size = Annotated[int, Meta(ge=1)]


class VisionFamily(StrEnum):
    CLIP = "clip"
    SIGLIP = "siglip"


class VisionActivation(StrEnum):
    """Activation of the feed-forward layers, by its name in config.json."""

    QUICK_GELU = "quick_gelu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"


class VisionTowerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a tower, as in config.json. Missing fields have CLIP's defaults."""

    family: ClassVar = VisionFamily.CLIP
    hidden: Size = field(name="hidden_size", default=768)
    intermediate: Size = field(name="intermediate_size", default=3072)
    layers: Size = field(name="num_hidden_layers", default=12)
    heads: Size = field(name="num_attention_heads", default=12)
    image_size: Size = 224
    patch_size: Size = 32
    num_channels: Annotated[int, Meta(ge=3, le=3)] = 3
    activation: VisionActivation = field(name="hidden_act", default=VisionActivation.QUICK_GELU)
    norm_eps: float = field(name="layer_norm_eps", default=1e-5)

    @property
    def patches(self) -> int:
        """Patches of an image; an incomplete patch at an edge is left out."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens(self) -> int:
        """Rows of the embedding: the patches, preceded by the class token for CLIP."""
        return self.patches + (self.family is VisionFamily.CLIP)


class SiglipSpec(VisionTowerSpec, frozen=True, kw_only=True):
    """Missing fields have SigLIP's defaults."""

    family: ClassVar = VisionFamily.SIGLIP
    patch_size: Size = 16
    activation: VisionActivation = field(name="hidden_act", default=VisionActivation.GELU_TANH)
    norm_eps: float = field(name="layer_norm_eps", default=1e-6)


def read_spec(folder: Path) -> VisionTowerSpec:
    """Read the config.json of a vision model, or of a model with a text and a vision tower.

    Raises:
        ConfigError: It is missing or malformed, or the tower is not supported.
    """
    file = folder / "config.json"
    try:
        text = file.read_bytes()
        kind = msgspec.json.decode(text, type=_Kind).model_type
        if kind not in _KINDS:
            raise ConfigError(f"{file}: model_type = {kind!r}: must be one of {', '.join(_KINDS)}")
        spec_type, nested = _KINDS[kind]
        raw = msgspec.json.decode(text, type=_Both).vision_config if nested else text
        spec = msgspec.json.decode(raw, type=spec_type)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from error
    if spec.hidden % spec.heads:
        raise ConfigError(
            f"{file}: hidden_size = {spec.hidden} is not a multiple of "
            f"num_attention_heads = {spec.heads}"
        )
    if spec.patch_size > spec.image_size:
        raise ConfigError(
            f"{file}: patch_size = {spec.patch_size} exceeds image_size = {spec.image_size}"
        )
    return spec


class _Kind(msgspec.Struct):
    model_type: str = ""


class _Both(msgspec.Struct):
    vision_config: msgspec.Raw


_KINDS: dict[str, tuple[type[VisionTowerSpec], bool]] = {
    "clip_vision_model": (VisionTowerSpec, False),
    "clip": (VisionTowerSpec, True),
    "siglip_vision_model": (SiglipSpec, False),
    "siglip": (SiglipSpec, True),
}
"""By `model_type`: the spec, and whether the tower is in `vision_config`."""
