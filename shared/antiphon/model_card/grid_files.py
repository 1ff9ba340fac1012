"""Reads how models from Qwen-VL to Kimi K2.5 take media: as grids of tokens."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
from msgspec import field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.image_grids import (
    GridImages,
    GridSizes,
    GridVideos,
    PaddedImages,
    PaddedSizes,
    Stamp,
)
from antiphon.model_card.images import Size
from antiphon.model_card.processor_files import (
    PROCESSOR,
    PixelFields,
    image_processor_file,
    video_processor_file,
)
from antiphon.model_card.videos import PAIR, FrameSampling, Sampling, SecondSampling

if TYPE_CHECKING:
    from pathlib import Path

DEEPSTACKS = ("qwen3_vl", "qwen3_vl_moe")
QWEN35S = ("qwen3_5", "qwen3_5_moe")
QWEN3S = (*DEEPSTACKS, *QWEN35S)
"""Those with patches of 16 pixels, and seconds between the grids of a video."""
GLMS = ("glm4v", "glm4v_moe")
PADDLEOCR = "paddleocr_vl"
VIDEO_GRIDS = ("qwen2_5_vl", "qwen2_vl", *QWEN3S, *GLMS)
"""Those that take videos, too."""
GRIDS = (*VIDEO_GRIDS, PADDLEOCR)
KIMI_K25 = "kimi_k25"


def read_grid(folder: Path) -> GridImages:
    """Read how a Qwen-VL, GLM-4V or PaddleOCR-VL model takes images, and videos, if it does.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, or not supported.
    """
    file = read_grid_file(folder)
    # As resolved: a default that is written down changes no key.
    plain = (
        msgspec.structs.replace(file, size=_GlmEdges())
        if isinstance(file, _GlmFile)
        else msgspec.structs.replace(file, size=_GridEdges(), min_pixels=None, max_pixels=None)
    )
    settings = msgspec.json.encode([plain, file.sizes])
    config = read_json(folder / "config.json", _Grid)
    return GridImages(
        placeholder=config.placeholder,
        deepstack=config.deepstack,
        sizes=file.sizes,
        videos=_read_videos(folder, config) if config.model_type in VIDEO_GRIDS else None,
        processing=hashlib.sha256(b"grid\0" + settings).digest(),
    )


def _read_videos(folder: Path, config: _Grid) -> GridVideos:
    file = read_video_file(folder)
    placeholder, markers, stamp = config.video_placeholder, ("<|video_pad|>",), None
    if config.model_type in QWEN3S:
        # Each grid has ends of its own, in place of those that templates write.
        markers = ("<|vision_start|><|video_pad|><|vision_end|>", *markers)
        stamp = Stamp(
            before="<{:.1f} seconds><|vision_start|>", after="<|vision_end|>", between=True
        )
    elif config.model_type in GLMS:
        placeholder, markers = config.placeholder, ("<|video|>",)
        stamp = Stamp(before="<|begin_of_image|>", after="<|end_of_image|>{}")
    seconds = config.vision_config.tokens_per_second
    pixels = [getattr(file, name) for name in PixelFields.__struct_fields__]
    return GridVideos(
        placeholder=placeholder,
        markers=markers,
        sampling=file.sampling,
        sizes=file.sizes,
        stamp=stamp,
        tokens_per_second=seconds if config.model_type == "qwen2_5_vl" else None,
        processing=hashlib.sha256(msgspec.json.encode(pixels)).digest(),
    )


class _GridTower(msgspec.Struct, frozen=True):
    patch_size: Size | None = None
    spatial_merge_size: Size = 2
    temporal_patch_size: Size = 2
    tokens_per_second: float = 4
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)


class _Grid(msgspec.Struct, frozen=True):
    model_type: str
    image_token_id: int | None = None
    video_token_id: int | None = None
    vision_config: _GridTower = field(default_factory=_GridTower)

    @property
    def placeholder(self) -> int:
        if self.image_token_id is not None:
            return self.image_token_id
        return _PLACEHOLDERS.get(self.model_type, 151655)

    @property
    def video_placeholder(self) -> int:
        if self.video_token_id is not None:
            return self.video_token_id
        return 248057 if self.model_type in QWEN35S else 151656

    @property
    def deepstack(self) -> int:
        stacked = self.model_type in DEEPSTACKS
        return len(self.vision_config.deepstack_visual_indexes) if stacked else 0

    @property
    def patch(self) -> int:
        return self.vision_config.patch_size or (16 if self.model_type in QWEN3S else 14)


_PLACEHOLDERS = {
    "glm4v": 151343,
    "glm4v_moe": 151363,
    PADDLEOCR: 100295,
    **dict.fromkeys(QWEN35S, 248056),
}


class _GlmEdges(msgspec.Struct, frozen=True):
    """Numbers of pixels of all frames, of which an image is two."""

    shortest_edge: Size = 112 * 112
    longest_edge: Size = 28 * 28 * 15000


class _GridEdges(msgspec.Struct, frozen=True):
    """Numbers of pixels, whatever their names say."""

    shortest_edge: Size = 56 * 56
    longest_edge: Size = 28 * 28 * 1280


class GridFile(PixelFields, frozen=True):
    """The preprocessor_config.json of Qwen2-VL, with the defaults of its class."""

    size: _GridEdges = field(default_factory=_GridEdges)
    min_pixels: Size | None = None
    max_pixels: Size | None = None
    patch_size: Size = 14
    merge_size: Size = 2

    @property
    def sizes(self) -> GridSizes:
        return GridSizes(
            patch=self.patch_size,
            merge=self.merge_size,
            pixels_min=self.min_pixels or self.size.shortest_edge,
            pixels_max=self.max_pixels or self.size.longest_edge,
        )


class _OcrFile(GridFile, frozen=True):
    """The preprocessor_config.json of PaddleOCR-VL, with the defaults of its class."""

    size: _GridEdges = field(default_factory=lambda: _GridEdges(384 * 384, 1536 * 1536))

    @property
    def sizes(self) -> GridSizes:
        return msgspec.structs.replace(super().sizes, fills=True)


class _FrameEdges(msgspec.Struct, frozen=True):
    """Numbers of pixels; None: by the model's class."""

    shortest_edge: Size | None = None
    longest_edge: Size | None = None


class VideoFile(PixelFields, frozen=True):
    """The settings of Qwen2-VL's video processor, with the defaults of its class.

    A rate of frames it has none by default; 2 is that of the models' own tools.
    """

    size: _FrameEdges = field(default_factory=_FrameEdges)
    min_pixels: Size | None = None
    max_pixels: Size | None = None
    patch_size: Size = 14
    merge_size: Size = 2
    temporal_patch_size: Size = 2
    fps: float | None = None
    num_frames: Size | None = None
    min_frames: Size = 4
    max_frames: Size = 768
    cap_pixels_per_frame: bool | None = None

    def check(self, file: Path, config: _Grid) -> None:
        tower = config.vision_config
        found = self.patch_size, self.merge_size, self.temporal_patch_size
        wanted = config.patch, tower.spatial_merge_size, tower.temporal_patch_size
        if found != wanted or found[-1] != PAIR:
            raise ConfigError(
                f"{file}: videos have patches of {found[0]} pixels, {found[1]} an edge of a token, "
                f"in {found[2]} frames; the tower takes {wanted}, and {PAIR} frames are supported"
            )
        if not self.do_resize or self.num_frames or self.cap_pixels_per_frame:
            raise ConfigError(
                f"{file}: do_resize = false, num_frames and cap_pixels_per_frame are not supported"
            )
        if (self.fps or 2.0) <= 0 or not PAIR <= self.min_frames <= self.max_frames:
            raise ConfigError(f"{file}: fps must be above 0, min_frames from {PAIR} to max_frames")

    @property
    def sampling(self) -> Sampling:
        return FrameSampling(fps=self.fps or 2.0, least=self.min_frames, most=self.max_frames)

    @property
    def sizes(self) -> GridSizes:
        least, most = self.min_pixels, self.max_pixels
        return GridSizes(
            patch=self.patch_size,
            merge=self.merge_size,
            pixels_min=least or self.size.shortest_edge or 128 * 28 * 28,
            pixels_max=most or self.size.longest_edge or 768 * 28 * 28,
        )


class _SharedVideoFile(VideoFile, frozen=True):
    """The settings of images, if videos have none: their sizes are those of Qwen's own tools.

    Frames as large as images would be more tokens than a context has within a minute. In the tools
    `min_pixels` goes before the limit of all frames; here a long video is seen in small ones.
    """

    @property
    def sizes(self) -> GridSizes:
        token = (self.patch_size * self.merge_size) ** 2
        return GridSizes(
            patch=self.patch_size,
            merge=self.merge_size,
            pixels_min=128 * token,
            pixels_max=768 * token,
            total=24_576 * token,
        )


class _StampedVideoFile(VideoFile, frozen=True):
    """Likewise of Qwen3-VL's and Qwen3.5's, whose numbers of pixels are those of all frames."""

    patch_size: Size = 16
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def sampling(self) -> Sampling:
        return msgspec.structs.replace(super().sampling, ends=True)

    @property
    def sizes(self) -> GridSizes:
        return GridSizes(
            patch=self.patch_size,
            merge=self.merge_size,
            pixels_min=self.size.shortest_edge or 128 * 32 * 32,
            pixels_max=self.size.longest_edge or 768 * 32 * 32,
            grows=True,
            joint=True,
        )


class _GlmVideoFile(VideoFile, frozen=True):
    """Likewise of GLM-4V's, whose numbers of pixels are those of all frames."""

    max_duration: Size = 300

    @property
    def sampling(self) -> Sampling:
        fps, seconds = self.fps or 2.0, self.max_duration
        return SecondSampling(fps=fps, seconds=seconds, most=max(PAIR, int(fps * seconds)))

    @property
    def sizes(self) -> GridSizes:
        return GridSizes(
            patch=self.patch_size,
            merge=self.merge_size,
            pixels_min=self.size.shortest_edge or 112 * 112,
            pixels_max=self.size.longest_edge or 28 * 28 * 2 * 30_000,
            grows=True,
            joint=True,
        )


def read_video_file(folder: Path) -> VideoFile:
    """Read how the preprocessor of a Qwen-VL or GLM-4V model scales videos.

    Raises:
        ConfigError: The file is malformed, does not fit the tower, or says what is not supported.
    """
    config = read_json(folder / "config.json", _Grid)
    found = video_processor_file(folder)
    if config.model_type in GLMS:
        # Its processor takes no number of frames, though it has one.
        read = msgspec.structs.replace(found.read(_GlmVideoFile), num_frames=None)
    elif config.model_type in QWEN3S:
        read = found.read(_StampedVideoFile)
    else:
        read = found.read(_SharedVideoFile if found.file.name == PROCESSOR else VideoFile)
    read.check(found.file, config)
    if read.sizes.pixels_min > read.sizes.pixels_max:
        raise ConfigError(f"{found.file}: the minimum of pixels exceeds the maximum")
    return read


class _GlmFile(PixelFields, frozen=True):
    """The preprocessor_config.json of GLM-4V, with the defaults of its class."""

    size: _GlmEdges = field(default_factory=_GlmEdges)
    patch_size: Size = 14
    merge_size: Size = 2
    temporal_patch_size: Size = 2

    @property
    def sizes(self) -> GridSizes:
        frames = self.temporal_patch_size
        return GridSizes(
            patch=self.patch_size,
            merge=self.merge_size,
            pixels_min=max(1, self.size.shortest_edge // frames),
            pixels_max=max(1, self.size.longest_edge // frames),
            grows=True,
        )

    @property
    def divides(self) -> bool:
        edges = self.size.shortest_edge, self.size.longest_edge
        return not any(edge % self.temporal_patch_size for edge in edges)


def read_grid_file(folder: Path) -> GridFile | _GlmFile:
    """Read how the preprocessor of a Qwen2-VL, GLM-4V or PaddleOCR-VL model scales images.

    Raises:
        ConfigError: The file is malformed, or does not fit the tower.
    """
    found = image_processor_file(folder)
    file, config = found.file, read_json(folder / "config.json", _Grid)
    plain = _OcrFile if config.model_type == PADDLEOCR else GridFile
    read = found.read(_GlmFile if config.model_type in GLMS else plain)
    if isinstance(read, _GlmFile) and not read.divides:
        raise ConfigError(
            f"{file}: size: must be multiples of temporal_patch_size = {read.temporal_patch_size}"
        )
    patch, merge = config.patch, config.vision_config.spatial_merge_size
    if (read.patch_size, read.merge_size) != (patch, merge):
        raise ConfigError(
            f"{file}: makes patches of {read.patch_size} pixels, {read.merge_size} an edge of a "
            f"token; the tower takes {patch} and {merge}"
        )
    if not read.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes whole tokens only")
    if read.sizes.pixels_min > read.sizes.pixels_max:
        raise ConfigError(
            f"{file}: min_pixels = {read.sizes.pixels_min} exceeds "
            f"max_pixels = {read.sizes.pixels_max}"
        )
    return read


class _KimiPatches(msgspec.Struct, frozen=True):
    patch_size: Size = 14
    merge_kernel_size: tuple[Size, ...] = (2, 2)


class _Kimi(msgspec.Struct, frozen=True):
    image_token_id: int = 163605
    vision_config: _KimiPatches = field(default_factory=_KimiPatches)


class _SideEdges(msgspec.Struct, frozen=True):
    """Numbers of patches, whatever their names say."""

    max_height: Size = 512
    max_width: Size = 512


class _PaddedFile(PixelFields, frozen=True):
    """The preprocessor_config.json of Kimi K2.5, with the defaults of its class."""

    size: _SideEdges = field(default_factory=_SideEdges)
    max_patches: Size = 16384
    patch_size: Size = 14
    merge_size: Size = 2
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)


def read_padded(folder: Path) -> PaddedImages:
    """Read how a Kimi K2.5 model takes images.

    Raises:
        ConfigError: config.json or the preprocessor's is malformed, or not supported.
    """
    file, sizes = read_padded_file(folder)
    settings = msgspec.json.encode([file, sizes])
    return PaddedImages(
        placeholder=read_json(folder / "config.json", _Kimi).image_token_id,
        sizes=sizes,
        processing=hashlib.sha256(b"padded\0" + settings).digest(),
    )


def read_padded_file(folder: Path) -> tuple[PixelFields, PaddedSizes]:
    """Read how the preprocessor of a Kimi K2.5 model scales images.

    Raises:
        ConfigError: The file is malformed, or does not fit the tower.
    """
    found = image_processor_file(folder)
    file, read = found.file, found.read(_PaddedFile)
    tower = read_json(folder / "config.json", _Kimi).vision_config
    made, taken = (read.merge_size, read.merge_size), tower.merge_kernel_size
    if read.patch_size != tower.patch_size or made != taken:
        raise ConfigError(
            f"{file}: makes patches of {read.patch_size} pixels, {read.merge_size} an edge of a "
            f"token; the tower takes {tower.patch_size} and {' x '.join(map(str, taken))}"
        )
    if not read.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes whole tokens only")
    if read.size.max_height != read.size.max_width:
        raise ConfigError(f"{file}: size: max_height and max_width must be equal")
    sizes = PaddedSizes(
        patch=read.patch_size,
        merge=read.merge_size,
        patches_max=read.max_patches,
        side_max=read.size.max_height,
    )
    return read, sizes
