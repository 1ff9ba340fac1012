"""Reads preprocessor_config.json; missing fields get the defaults of the model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.config.errors import ConfigError
from antiphon.encoder.spec import Size, VisionFamily, VisionTowerSpec

if TYPE_CHECKING:
    from pathlib import Path

Channels = tuple[float, float, float]
"""One value each for red, green and blue."""

BICUBIC = 3


@dataclass(frozen=True, slots=True)
class PreprocessorConfig:
    """Preprocessing steps from an image to the pixels of a tower, in this order.

    Attributes:
        size: Edge of the tower's input square.
        short_edge: Resize the shorter edge to this, keeping the aspect ratio, and crop the square
            from the center; unset: resize to the square, ignoring the aspect ratio.
        resample: The filter, by Pillow's number.
        scale: Factor for every value (0 to 255).
        mean: Subtracted after scaling.
        std: Divisor after that.
    """

    size: int
    short_edge: int | None
    resample: int
    scale: float
    mean: Channels
    std: Channels


def read_preprocessor_config(folder: Path, spec: VisionTowerSpec) -> PreprocessorConfig:
    """Read a folder's preprocessor config; unset fields get the family's defaults.

    Raises:
        ConfigError: It is malformed, or its image size does not match the tower.
    """
    file = folder / "preprocessor_config.json"
    card = _read(file)
    chosen = _CHOSEN[spec.family]
    if not card.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes images of one size only")
    return PreprocessorConfig(
        size=spec.image_size,
        short_edge=_short_edge(file, card, spec),
        resample=card.resample,
        scale=card.rescale_factor if card.do_rescale else 1.0,
        mean=(card.image_mean or chosen.mean) if card.do_normalize else (0.0, 0.0, 0.0),
        std=(card.image_std or chosen.std) if card.do_normalize else (1.0, 1.0, 1.0),
    )


class _Edges(msgspec.Struct):
    """A size in newer files: both edges, or the shorter one."""

    height: Size | None = None
    width: Size | None = None
    shortest_edge: Size | None = None


class _PreprocessorFile(msgspec.Struct):
    do_resize: bool = True
    size: Size | _Edges | None = None
    resample: Annotated[int, Meta(ge=0, le=5)] = BICUBIC
    do_center_crop: bool | None = None
    crop_size: Size | _Edges | None = None
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: Channels | None = None
    image_std: Channels | None = None


@dataclass(frozen=True, slots=True)
class _FamilyDefaults:
    """The defaults of a model family."""

    mean: Channels
    std: Channels
    crops: bool


_CHOSEN = {
    VisionFamily.CLIP: _FamilyDefaults(
        (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), crops=True
    ),
    VisionFamily.SIGLIP: _FamilyDefaults((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), crops=False),
}


def _read(file: Path) -> _PreprocessorFile:
    if not file.exists():
        return _PreprocessorFile()
    try:
        return msgspec.json.decode(file.read_bytes(), type=_PreprocessorFile)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from error


def _short_edge(file: Path, card: _PreprocessorFile, spec: VisionTowerSpec) -> int | None:
    """The shorter edge to resize to, or None to resize to a square; checked against the tower."""
    crops = _CHOSEN[spec.family].crops if card.do_center_crop is None else card.do_center_crop
    size = card.size or spec.image_size
    if isinstance(size, int):
        # Older files have a plain number: CLIP's shorter edge, or the edge of SigLIP's square.
        size = _Edges(shortest_edge=size) if crops else _Edges(height=size, width=size)
    made = _square(card.crop_size or spec.image_size) if crops else (size.height, size.width)
    if made != (spec.image_size, spec.image_size):
        raise ConfigError(
            f"{file}: makes images of {made[0]} x {made[1]} pixels; the tower takes "
            f"{spec.image_size} x {spec.image_size}"
        )
    if not crops:
        return None
    if size.shortest_edge is None or size.shortest_edge < spec.image_size:
        raise ConfigError(f"{file}: size.shortest_edge must be {spec.image_size} or more")
    return size.shortest_edge


def _square(size: int | _Edges) -> tuple[int | None, int | None]:
    return (size, size) if isinstance(size, int) else (size.height, size.width)
