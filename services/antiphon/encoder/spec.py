"""Reads the shape of a vision tower from config.json. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

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


@dataclass(frozen=True, slots=True)
class VisionTowerSpec:
    family: VisionFamily
    hidden: int
    intermediate: int
    layers: int
    heads: int
    image_size: int
    patch_size: int
    activation: VisionActivation
    norm_eps: float

    @property
    def patches(self) -> int:
        """Patches of an image; an incomplete patch at an edge is left out."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens(self) -> int:
        """Rows of the embedding: the patches, preceded by the class token for CLIP."""
        return self.patches + (self.family is VisionFamily.CLIP)


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
        family, config_type, nested = _KINDS[kind]
        raw = msgspec.json.decode(text, type=_Both).vision_config if nested else text
        config = msgspec.json.decode(raw, type=config_type)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from error
    if config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"{file}: hidden_size = {config.hidden_size} is not a multiple of "
            f"num_attention_heads = {config.num_attention_heads}"
        )
    if config.patch_size > config.image_size:
        raise ConfigError(
            f"{file}: patch_size = {config.patch_size} exceeds image_size = {config.image_size}"
        )
    return VisionTowerSpec(
        family=family,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        image_size=config.image_size,
        patch_size=config.patch_size,
        activation=config.hidden_act,
        norm_eps=config.layer_norm_eps,
    )


class _Kind(msgspec.Struct):
    model_type: str = ""


class _Both(msgspec.Struct):
    vision_config: msgspec.Raw


class _Clip(msgspec.Struct):
    """Missing fields have CLIP's defaults."""

    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 12
    image_size: Size = 224
    patch_size: Size = 32
    num_channels: Annotated[int, Meta(ge=3, le=3)] = 3
    hidden_act: VisionActivation = VisionActivation.QUICK_GELU
    layer_norm_eps: float = 1e-5


class _Siglip(_Clip):
    """Missing fields have SigLIP's defaults."""

    patch_size: Size = 16
    hidden_act: VisionActivation = VisionActivation.GELU_TANH
    layer_norm_eps: float = 1e-6


_KINDS: dict[str, tuple[VisionFamily, type[_Clip], bool]] = {
    "clip_vision_model": (VisionFamily.CLIP, _Clip, False),
    "clip": (VisionFamily.CLIP, _Clip, True),
    "siglip_vision_model": (VisionFamily.SIGLIP, _Siglip, False),
    "siglip": (VisionFamily.SIGLIP, _Siglip, True),
}
"""By `model_type`: the family, the struct, and whether the tower is in `vision_config`."""
