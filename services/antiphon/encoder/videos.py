"""Decodes and resizes the frames of videos that a model sees. Runs in child processes."""

from __future__ import annotations

import importlib
import io
from itertools import islice
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from PIL import Image

from antiphon.encoder.preprocess import DecodedImage, Preprocessor, PreprocessorConfig
from antiphon.model_card.vision.videos import PAIR
from antiphon.wire.errors import InvalidRequest, RequestTooLarge, Unsupported
from antiphon.wire.frames import is_frame_list, unpack_frames

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from antiphon.model_card.vision.frame_videos import FrameVideos
    from antiphon.model_card.vision.grid_sizes import GridSizes
    from antiphon.wire.claim import PixelLimits, VideoHeader

DEMUXER = "mp4"
"""FFmpeg's name, of MP4 and QuickTime files. Others are not exposed: some open further files."""
CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"})
"""FFmpeg's names of the usual ones. Its other decoders are not exposed to untrusted data."""
_DECODERS = ("libdav1d",)
"""FFmpeg's names of decoders that differ from their codec's."""
_OPTIONS = {
    # All frames of the file are there, as its index counts them, also those that a cut has hidden.
    "ignore_editlist": "1",
    # All tracks are looked into when a file is opened, by their decoders.
    "codec_whitelist": ",".join((*sorted(CODECS), *_DECODERS)),
}

_BROKEN = (OSError, ValueError, EOFError, LookupError, RuntimeError, ArithmeticError, MemoryError)
"""Exceptions beside FFmpeg's own that PyAV raises on bytes that are not a video."""


class VideoPreprocessor:
    """Chooses, decodes and resizes frames. Has no mutable state.

    `pixels_max` is the maximum of a frame; `card` says how many rows frames have that are squares.
    """

    def __init__(
        self, recipe: PreprocessorConfig, *, pixels_max: int, card: FrameVideos | None = None
    ) -> None:
        self.recipe = recipe
        self.depth = 1 if recipe.grid is None else PAIR
        """Frames that the tower sees at once."""
        self._images = Preprocessor(recipe, pixels_max=pixels_max)
        self._pixels_max = pixels_max
        self._card = card

    def chosen(
        self, width: int, height: int, video: VideoHeader, limits: PixelLimits | None
    ) -> tuple[list[int], tuple[int, int]]:
        """The frames that are seen, and the width and height that they are scaled to.

        They decide the embedding, with the bytes: its times are written or placed in the prompt.

        Raises:
            InvalidRequest: It is too narrow, has too many frames, or no size within `limits`.
        """
        recipe = self.recipe.within(limits)
        assert recipe.sampling is not None, "a recipe of videos"
        indices = recipe.sampling.indices(video)
        if recipe.grid is None:
            return indices, (recipe.size, recipe.size)
        sizes = cast("GridSizes", recipe.grid)
        return indices, sizes.scaled(width, height, recipe.sampling.counted(indices))

    def tokens(
        self, width: int, height: int, video: VideoHeader, limits: PixelLimits | None
    ) -> int:
        """Tokens of a video, by its header.

        Raises:
            InvalidRequest: It is too narrow, has too many frames, or no size within `limits`.
        """
        indices, (across, down) = self.chosen(width, height, video, limits)
        if self._card is not None:
            return self._card.rows(len(indices))
        edge = cast("GridSizes", self.recipe.grid).edge
        return -(-len(indices) // PAIR) * (across // edge) * (down // edge)

    def decoded(
        self,
        data: bytes | bytearray,
        width: int,
        height: int,
        video: VideoHeader,
        limits: PixelLimits | None = None,
    ) -> DecodedImage:
        """Return the frames that are seen, resized: whole pairs where the tower sees these.

        Raises:
            InvalidRequest: It is not a video, is not what its header says, or cannot be scaled
                within `limits`.
            RequestTooLarge: Its frames have too many pixels.
        """
        if width * height > self._pixels_max:
            raise RequestTooLarge.of(size_bytes=width * height, bytes_max=self._pixels_max)
        indices, size = self.chosen(width, height, video, limits)
        if is_frame_list(data):
            frames = (self._images.image(each, (width, height)) for each in unpack_frames(data))
        else:
            frames = file_frames(data, indices)
        # They may take most of the process's memory: no second copy is made of them.
        rows, made = len(indices) + -len(indices) % self.depth, 0
        pixels = np.empty((rows, size[1], size[0], 3), np.uint8)
        for frame in islice(frames, len(indices)):
            if frame.size != (width, height):
                raise InvalidRequest(
                    f"a frame has {frame.width} x {frame.height} pixels, and {width} x {height} by "
                    "the header of its video"
                )
            pixels[made] = np.asarray(self._scaled(frame, size))
            made += 1
        if made < len(indices):
            raise InvalidRequest("the video has fewer frames than its header says")
        pixels[made:] = pixels[made - 1]
        return DecodedImage(pixels, width, height, video=True)

    def _scaled(self, frame: Image.Image, size: tuple[int, int]) -> Image.Image:
        """A frame of this size; some models scale it in its own shape first."""
        if self.recipe.tiling is None:
            return frame.resize(size, self.recipe.resample)
        (scaled,) = self._images.fitted(frame)
        return scaled

    def normalized(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Scale and normalize: (F, H, W, 3)  ->  (F, 3, H, W)."""
        return self._images.normalized(pixels)


def file_frames(data: bytes | bytearray, indices: Sequence[int]) -> Iterator[Image.Image]:
    """Decode these frames of a video, rising, upright.

    Raises:
        InvalidRequest: It is not a video of a known format and codec.
        Unsupported: The package that decodes videos is not installed.
    """
    try:
        library = cast("_Library", importlib.import_module("av"))
    except ImportError as error:
        raise Unsupported("videos as files require the extra antiphon[encoder]") from error
    wanted = iter(indices)
    following = next(wanted, None)
    try:
        with library.open(io.BytesIO(data), format=DEMUXER, options=_OPTIONS) as container:
            stream = next(iter(container.streams.video), None)
            context = None if stream is None else stream.codec_context
            name = "none" if context is None else context.codec.canonical_name
            if stream is None or name not in CODECS:
                raise InvalidRequest(
                    f"the video has the codec {name}; known are {', '.join(sorted(CODECS))}"
                )
            for index, frame in enumerate(container.decode(stream)):
                if index != following:
                    continue
                yield _upright(frame)
                if (following := next(wanted, None)) is None:
                    return
    except (library.error.FFmpegError, *_BROKEN) as error:
        raise InvalidRequest(f"the video cannot be decoded: {error}") from error


def _upright(frame: _Frame) -> Image.Image:
    pixels = frame.to_ndarray(format="rgb24")
    return Image.fromarray(np.ascontiguousarray(np.rot90(pixels, frame.rotation // 90)))


class _Frame(Protocol):
    rotation: int

    def to_ndarray(self, *, format: str) -> NDArray[np.uint8]: ...  # noqa: A002  # PyAV's name


class _Codec(Protocol):
    canonical_name: str


class _CodecContext(Protocol):
    codec: _Codec


class _Stream(Protocol):
    codec_context: _CodecContext | None


class _Streams(Protocol):
    video: Sequence[_Stream]


class _Container(Protocol):
    streams: _Streams

    def decode(self, stream: _Stream, /) -> Iterator[_Frame]: ...


class _Errors(Protocol):
    FFmpegError: type[Exception]


class _Library(Protocol):
    """What is used of PyAV."""

    error: _Errors

    def open(
        self,
        file: io.BytesIO,
        *,
        format: str,  # noqa: A002  # PyAV's name
        options: dict[str, str],
    ) -> AbstractContextManager[_Container]: ...
