"""Videos that are a grid of tokens for each two of their frames: Qwen-VL, GLM-4V."""

from __future__ import annotations

import hashlib
import math
from itertools import chain
from typing import TYPE_CHECKING, Self

import msgspec
from msgspec import field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import PROCESSOR, PixelFields, video_processor_file
from antiphon.model_card.vision.base import Pieces, Size
from antiphon.model_card.vision.grid_fields import GLMS, QWEN3S, GridFields
from antiphon.model_card.vision.grid_sizes import GridSizes
from antiphon.model_card.vision.videos import (
    PAIR,
    FrameSampling,
    Sampling,
    SecondSampling,
    SeenVideo,
)
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from antiphon.wire.claim import PixelLimits, VideoHeader


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around each grid of a video.

    Attributes:
        before: With a place for the seconds, or without.
        after: Likewise.
        between: The seconds are those between the two frames; else the whole ones of the first.
    """

    before: str
    after: str
    between: bool = False

    def pieces(self, tokens: int, first: float, last: float) -> Pieces:
        """What stands for two frames, which are seen at these seconds."""
        seconds = (first + last) / 2 if self.between else math.floor(first)
        return self.before.format(seconds), tokens, self.after.format(seconds)


class GridVideos(msgspec.Struct, frozen=True, kw_only=True):
    """A video is a grid of tokens for each two of its frames: Qwen-VL, GLM-4V.

    Attributes:
        placeholder: Token id of the placeholder, one for each row of an embedding.
        markers: What chat templates write for a video; of several the first one that is there.
        stamp: Set: each grid stands alone, with the seconds at which it is seen.
        tokens_per_second: Positions of a second; None: of a grid.
        processing: Digest of what decides the embedding beside sampling, sizes and the weights.
    """

    placeholder: int
    markers: tuple[str, ...]
    sampling: Sampling
    sizes: GridSizes
    stamp: Stamp | None = None
    tokens_per_second: float | None = None
    processing: bytes

    def within(self, limits: PixelLimits) -> Self:
        """The card of videos whose frames and sizes are limited by their request.

        Raises:
            InvalidRequest: No video has such sizes, or they exceed the model's.
        """
        sizes, sampling = self.sizes.within(limits), self.sampling.within(limits)
        return msgspec.structs.replace(self, sizes=sizes, sampling=sampling)

    def seen(self, width: int, height: int, video: VideoHeader) -> SeenVideo:
        """What stands for a video whose frames have this size in pixels.

        Raises:
            InvalidRequest: It is too narrow, or has too many frames.
        """
        indices = self.sampling.indices(video)
        across, down = self.sizes.scaled(width, height, self.sampling.counted(indices))
        edge, times = self.sizes.edge, -(-len(indices) // PAIR)
        tokens, columns = across // edge * (down // edge), across // edge
        if self.stamp is not None:
            ends = [(indices[at], indices[min(at + 1, len(indices) - 1)]) for at in _pairs(indices)]
            written = [
                self.stamp.pieces(tokens, *(each / video.fps for each in pair)) for pair in ends
            ]
            return SeenVideo(tuple(chain.from_iterable(written)), columns)
        step = 1.0
        if self.tokens_per_second is not None:
            step = self.tokens_per_second * PAIR / (len(indices) / video.frames * video.fps)
        if (times - 1) * step >= times * tokens:
            # Positions are looked up in tables that are as long as the context.
            raise InvalidRequest(
                f"the {len(indices)} frames that are seen lie too far apart for "
                f"{times * tokens} tokens: ask for more of them (fps), or larger ones"
            )
        return SeenVideo((times * tokens,), columns, times, step)

    def processed(self, video: VideoHeader) -> bytes:
        """Digest of all that decides a video's embedding and positions beside its bytes."""
        settings = msgspec.json.encode([self.sampling, self.sizes, video])
        return hashlib.sha256(b"video\0" + self.processing + settings).digest()


def _pairs(indices: Sequence[int]) -> range:
    return range(0, len(indices), PAIR)


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

    def check(self, file: Path, config: GridFields) -> None:
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


def read_grid_videos(folder: Path, config: GridFields) -> GridVideos:
    """Read how a Qwen-VL or GLM-4V model takes videos.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, or not supported.
    """
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


def read_video_file(folder: Path) -> VideoFile:
    """Read how the preprocessor of a Qwen-VL or GLM-4V model scales videos.

    Raises:
        ConfigError: The file is malformed, does not fit the tower, or says what is not supported.
    """
    config = read_json(folder / "config.json", GridFields)
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
