"""Reads how images and frames are preprocessed, by the files of a model's processors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.config.errors import ConfigError
from antiphon.encoder.preprocess import BILINEAR, Channels, PreprocessorConfig
from antiphon.encoder.tower_spec import Size
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import (
    ModelKind,
    PixelFields,
    image_processor_file,
    video_processor_file,
)
from antiphon.model_card.vision.areas import GEMMA4, read_area_file
from antiphon.model_card.vision.canvas_tiles import CanvasTiling
from antiphon.model_card.vision.frame_videos import FRAME_SAMPLINGS, read_frame_sampling
from antiphon.model_card.vision.grid_fields import VIDEO_GRIDS
from antiphon.model_card.vision.grid_videos import read_video_file
from antiphon.model_card.vision.grids import read_grid_file
from antiphon.model_card.vision.hd_tiles import PHI4, read_hd_file
from antiphon.model_card.vision.padded_grids import KIMI_K25, read_padded_file
from antiphon.model_card.vision.padded_tiles import AnyresTiling
from antiphon.model_card.vision.rows import has_rows, read_rows
from antiphon.model_card.vision.slices import MINICPM, read_slices
from antiphon.model_card.vision.stacked_tiles import AspectTiling
from antiphon.model_card.vision.tiles import Tiling, read_smol_videos

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.encoder.tower_spec import VisionTowerSpec
    from antiphon.model_card.vision.areas import AreaSizes
    from antiphon.model_card.vision.grid_sizes import GridSizes
    from antiphon.model_card.vision.hd_tiles import HdTiling
    from antiphon.model_card.vision.padded_grids import PaddedSizes
    from antiphon.model_card.vision.rows import RowSizes
    from antiphon.model_card.vision.slices import SliceTiling


def read_preprocessor_config(folder: Path, spec: VisionTowerSpec) -> PreprocessorConfig:
    """Read a folder's preprocessor config; unset fields get the family's defaults.

    Raises:
        ConfigError: It is malformed, or its image size does not match the tower.
    """
    found = image_processor_file(folder)
    file, card = found.file, found.read(_PreprocessorFile)
    if not card.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes images of one size only")
    tiling = spec.read_tiling(folder)
    if tiling is not None and tiling.tile != spec.image_size:
        raise ConfigError(
            f"{file}: makes tiles of {tiling.tile} pixels; the tower takes {spec.image_size}"
        )
    cut = isinstance(tiling, Tiling | AspectTiling | CanvasTiling)
    short = None if cut else _short_edge(file, card, spec)
    if isinstance(tiling, AnyresTiling) and short not in (None, spec.image_size):
        raise ConfigError(f"{file}: size.shortest_edge must be {spec.image_size}")
    return _of_squares(card, spec, short_edge=short, tiling=tiling)


def read_frame_config(folder: Path, spec: VisionTowerSpec) -> PreprocessorConfig | None:
    """Read how the frames of videos are preprocessed where they are squares; None: it takes none.

    Raises:
        ConfigError: The file is malformed, or its image size does not match the tower.
    """
    found, smol = video_processor_file(folder), read_smol_videos(folder)
    kind = read_json(folder / "config.json", ModelKind).model_type
    if smol is None and kind not in FRAME_SAMPLINGS:
        return None
    card = found.read(_PreprocessorFile)
    if not card.do_resize:
        raise ConfigError(f"{found.file}: do_resize = false: the tower takes frames of one size")
    if smol is not None:
        tiling, sampling = smol
        if tiling.tile != spec.image_size:
            raise ConfigError(
                f"{found.file}: makes frames of {tiling.tile} pixels; the tower takes "
                f"{spec.image_size}"
            )
        return replace(_of_squares(card, spec, tiling=tiling), sampling=sampling)
    if _short_edge(found.file, card, spec) is not None:
        raise ConfigError(f"{found.file}: frames of videos must be scaled to a square")
    return replace(_of_squares(card, spec), sampling=read_frame_sampling(folder))


def _of_squares(
    card: _PreprocessorFile,
    spec: VisionTowerSpec,
    *,
    short_edge: int | None = None,
    tiling: Tiling | AspectTiling | AnyresTiling | CanvasTiling | None = None,
) -> PreprocessorConfig:
    return PreprocessorConfig(
        size=spec.image_size,
        short_edge=short_edge,
        tiling=tiling,
        resample=spec.filter if card.resample is None else card.resample,
        scale=card.rescale_factor if card.do_rescale else 1.0,
        mean=(card.image_mean or spec.mean) if card.do_normalize else (0.0, 0.0, 0.0),
        std=(card.image_std or spec.std) if card.do_normalize else (1.0, 1.0, 1.0),
        bfloat16=spec.bfloat16 and card.do_rescale and card.do_normalize,
    )


def read_grid_config(folder: Path) -> PreprocessorConfig:
    """Read the preprocessor config of a model whose images keep their shape.

    Raises:
        ConfigError: It is malformed, or does not fit the tower.
    """
    kind = read_json(folder / "config.json", ModelKind).model_type
    if kind == MINICPM:
        file, tiling = read_slices(folder)
        return _keeping_shape(file, tiling.edge, tiling=tiling)
    if kind == PHI4:
        file, tiling = read_hd_file(folder)
        made = _keeping_shape(file, tiling.tile, tiling=tiling)
        return replace(made, resample=BILINEAR)  # the file's filter is that of all of an image
    if has_rows(folder):
        file, sizes = read_rows(folder)
    elif kind == GEMMA4:
        file, sizes = read_area_file(folder)
    elif kind == KIMI_K25:
        file, sizes = read_padded_file(folder)
    else:
        file = read_grid_file(folder)
        sizes = file.sizes
    return _keeping_shape(file, sizes.edge, grid=sizes)


def read_video_config(folder: Path) -> PreprocessorConfig | None:
    """Read how a Qwen-VL or GLM-4V model's videos are preprocessed; None: it takes none.

    Raises:
        ConfigError: The file is malformed, or does not fit the tower.
    """
    if read_json(folder / "config.json", ModelKind).model_type not in VIDEO_GRIDS:
        return None
    file = read_video_file(folder)
    made = _keeping_shape(file, file.sizes.edge, grid=file.sizes)
    return replace(made, sampling=file.sampling)


def _keeping_shape(
    file: PixelFields,
    edge: int,
    *,
    grid: GridSizes | RowSizes | AreaSizes | PaddedSizes | None = None,
    tiling: SliceTiling | HdTiling | None = None,
) -> PreprocessorConfig:
    return PreprocessorConfig(
        size=edge,
        short_edge=None,
        resample=file.resample,
        scale=file.rescale_factor if file.do_rescale else 1.0,
        mean=file.image_mean if file.do_normalize else (0.0, 0.0, 0.0),
        std=file.image_std if file.do_normalize else (1.0, 1.0, 1.0),
        grid=grid,
        tiling=tiling,
    )


class _Edges(msgspec.Struct):
    """A size in newer files: both edges, or the shorter one."""

    height: Size | None = None
    width: Size | None = None
    shortest_edge: Size | None = None


class _PreprocessorFile(msgspec.Struct):
    do_resize: bool = True
    size: Size | _Edges | None = None
    resample: Annotated[int, Meta(ge=0, le=5)] | None = None
    do_center_crop: bool | None = None
    crop_size: Size | _Edges | None = None
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: Channels | None = None
    image_std: Channels | None = None


def _short_edge(file: Path, card: _PreprocessorFile, spec: VisionTowerSpec) -> int | None:
    """The shorter edge to resize to, or None to resize to a square; checked against the tower."""
    crops = spec.crops if card.do_center_crop is None else card.do_center_crop
    size, crop = card.size or spec.image_size, card.crop_size or spec.image_size
    if isinstance(size, int):
        # Older files have a plain number: CLIP's shorter edge, or the edge of SigLIP's square.
        size = _Edges(shortest_edge=size) if crops else _Edges(height=size, width=size)
    if isinstance(crop, int):
        crop = _Edges(height=crop, width=crop)
    made = crop if crops else size
    if (made.height, made.width) != (spec.image_size, spec.image_size):
        raise ConfigError(
            f"{file}: makes images of {made.height} x {made.width} pixels; the tower takes "
            f"{spec.image_size} x {spec.image_size}"
        )
    if not crops:
        return None
    if size.shortest_edge is None or size.shortest_edge < spec.image_size:
        raise ConfigError(f"{file}: size.shortest_edge must be {spec.image_size} or more")
    return size.shortest_edge
