"""Images as vision towers take them: decoded, resized and normalized."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

# msgspec reads the fields of structs.
from antiphon.model_card.vision.areas import AreaSizes  # noqa: TC001
from antiphon.model_card.vision.base import check_unscaled
from antiphon.model_card.vision.canvas_tiles import CanvasTiling
from antiphon.model_card.vision.grid_sizes import GridSizes  # noqa: TC001
from antiphon.model_card.vision.hd_tiles import HdTiling
from antiphon.model_card.vision.padded_grids import PaddedSizes
from antiphon.model_card.vision.padded_tiles import AnyresTiling
from antiphon.model_card.vision.rows import RowSizes  # noqa: TC001
from antiphon.model_card.vision.slices import SliceTiling
from antiphon.model_card.vision.stacked_tiles import AspectTiling
from antiphon.model_card.vision.tiles import Tiling
from antiphon.model_card.vision.videos import Sampling  # noqa: TC001
from antiphon.wire.errors import InvalidRequest, RequestTooLarge

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from antiphon.wire.claim import PixelLimits

Channels = tuple[float, float, float]
"""One value each for red, green and blue."""


LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Filters, by Pillow's numbers."""


FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""The usual web formats. Pillow's other decoders are not exposed to untrusted data."""

_BROKEN = (
    OSError,  # unknown formats and truncated files too
    SyntaxError,  # a broken PNG
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    MemoryError,
    RuntimeError,  # features that a decoder does not implement too
    struct.error,
    zlib.error,
)
"""Exceptions that Pillow raises on bytes that are not an image."""

# Pillow's own guard has one limit per process and only warns between that limit and twice as much.
# `pixels_max` is checked against the header, before any pixel is decoded.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    """The frames (F, H, W, 3) of an image or a video, and its own size in pixels, upright.

    Of an image that is cut to slices, `overview` (1, H', W', 3) is all of it, before them.
    """

    pixels: NDArray[np.uint8]
    width: int
    height: int
    video: bool = False
    overview: NDArray[np.uint8] | None = None


class Preprocessor:
    """Decodes, resizes, crops and normalizes. Called in one thread; has no mutable state.

    `pixels_max` is the maximum of an image, both as received and as resized.
    """

    def __init__(self, recipe: PreprocessorConfig, *, pixels_max: int) -> None:
        self._recipe = recipe
        self._pixels_max = pixels_max
        self._mean = self._rounded(np.array(recipe.mean, dtype=np.float32))
        self._std = self._rounded(np.array(recipe.std, dtype=np.float32))

    def __call__(self, data: bytes | bytearray) -> NDArray[np.float32]:
        """Return the frames of an image as (F, 3, size, size), in RGB order: all are of one size.

        Raises:
            InvalidRequest: It is not an image of one of `FORMATS`, or it is too narrow.
            RequestTooLarge: The image has too many pixels.
        """
        (frames,) = self.frames(self.decoded(data))
        return frames

    def frames(self, image: DecodedImage) -> list[NDArray[np.float32]]:
        """Scale and normalize the frames of an image, those of one size together: (F, 3, H, W)."""
        if isinstance(tiling := self._recipe.tiling, HdTiling):
            columns, rows = tiling.of(len(image.pixels)).grid(image.width, image.height)
            whole = _all_of(image.pixels, columns, rows)
            return [self.normalized(np.concatenate((whole[None], image.pixels), dtype=np.float32))]
        parts = [image.pixels] if image.overview is None else [image.overview, image.pixels]
        return [self.normalized(part) for part in parts]

    def decoded(
        self,
        data: bytes | bytearray,
        width: int = 0,
        height: int = 0,
        limits: PixelLimits | None = None,
    ) -> DecodedImage:
        """Return the frames, decoded and resized, but not normalized.

        Raises:
            InvalidRequest: It is not an image of one of `FORMATS`, it is too narrow, it has
                another size than `width` and `height`, if these are not 0, or it cannot be scaled
                within `limits`.
            RequestTooLarge: The image has too many pixels.
        """
        image = self.image(data, (width, height))
        if (width or height) and image.size != (width, height):
            raise InvalidRequest(
                f"the image has {image.width} x {image.height} pixels, and {width} x {height} by "
                "its header",
                param="image",
            )
        frames = [np.asarray(frame, dtype=np.uint8) for frame in self.fitted(image, limits)]
        overview = None
        if frames[0].shape != frames[-1].shape:
            overview, frames = frames[0][None], frames[1:]
        return DecodedImage(np.stack(frames), image.width, image.height, overview=overview)

    def normalized(self, pixels: NDArray[np.uint8 | np.float32]) -> NDArray[np.float32]:
        """Scale and normalize: (F, size, size, 3)  ->  (F, 3, size, size)."""
        values = self._rounded(pixels.astype(np.float32) * np.float32(self._recipe.scale))
        values = self._rounded(self._rounded(values - self._mean) / self._std)
        return np.ascontiguousarray(values.transpose(0, 3, 1, 2))

    def _rounded(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return _bfloat16(values) if self._recipe.bfloat16 else values

    @property
    def recipe(self) -> PreprocessorConfig:
        return self._recipe

    def image(self, data: bytes | bytearray, size: tuple[int, int] = (0, 0)) -> Image.Image:
        """Decode an image, upright and opaque.

        With another `size` by its header than it has upright, it is left as it is stored: of the
        places where an orientation may be, the header's reader knows EXIF data before the pixels.

        Raises:
            InvalidRequest: It is not an image of one of `FORMATS`.
            RequestTooLarge: The image has too many pixels.
        """
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                self._check_size(image)
                upright = ImageOps.exif_transpose(image)
                return _opaque(image if upright.size != size == image.size else upright)
        except Image.UnidentifiedImageError as error:
            raise InvalidRequest(
                f"not an image of a known format ({', '.join(FORMATS)})", param="image"
            ) from error
        except _BROKEN as error:
            raise InvalidRequest(f"the image cannot be decoded: {error}", param="image") from error

    def _check_size(self, image: Image.Image) -> None:
        pixels = image.width * image.height
        if pixels > self._pixels_max:
            raise RequestTooLarge(
                f"The image has {pixels} pixels; the limit is {self._pixels_max} pixels.",
                param="image",
                details={"pixels": str(pixels), "pixels_max": str(self._pixels_max)},
            )

    def fitted(self, image: Image.Image, limits: PixelLimits | None = None) -> list[Image.Image]:
        """Resize an image to the frames that the tower takes."""
        recipe = self._recipe.within(limits)
        size, short, filter_ = recipe.size, recipe.short_edge, recipe.resample
        match recipe.tiling:
            case Tiling() as tiling:
                return _tiles(image, tiling, filter_)
            case AspectTiling() as tiling:
                return _stacked(image, tiling, filter_)
            case AnyresTiling() as tiling:
                return _padded(image, tiling, filter_)
            case CanvasTiling() as tiling:
                return _on_canvas(image, tiling, filter_)
            case SliceTiling() as tiling:
                self._check_scaled(image, tiling.slices(*image.size))
                return _slices(image, tiling, filter_)
            case HdTiling() as tiling:
                return _on_white(image, tiling, filter_)
            case None:
                pass
        if isinstance(recipe.grid, PaddedSizes):
            canvas = Image.new("RGB", recipe.grid.scaled(*image.size))
            canvas.paste(image.resize(recipe.grid.content(*image.size), filter_))
            return [canvas]
        if recipe.grid is not None:
            return [image.resize(recipe.grid.scaled(*image.size), filter_)]
        if short is None:
            return [image.resize((size, size), filter_)]
        width, height = (short * edge // min(image.size) for edge in image.size)
        self._check_scaled(image, (width, height))
        left, top = (width - size) // 2, (height - size) // 2
        return [image.resize((width, height), filter_).crop((left, top, left + size, top + size))]

    def _check_scaled(self, image: Image.Image, size: tuple[int, int]) -> None:
        if size[0] * size[1] > self._pixels_max:
            # An image a few pixels wide and millions long would be resized to billions of pixels.
            raise InvalidRequest(
                f"an image of {image.width} x {image.height} pixels is too narrow", param="image"
            )


def _tiles(image: Image.Image, tiling: Tiling, filter_: int) -> list[Image.Image]:
    """Cut an image into tiles, row by row, and scale all of it to the last one."""
    columns, rows = tiling.grid(*image.size)
    edge = tiling.tile
    image = image.resize(tiling.scaled(*image.size), filter_)
    if tiling.splits:
        image = image.resize((columns * edge, rows * edge), filter_)
    if (columns, rows) == (1, 1):
        return [image if image.size == (edge, edge) else image.resize((edge, edge), filter_)]
    return [*_cut(image, columns, rows, edge), image.resize((edge, edge), filter_)]


def _stacked(image: Image.Image, tiling: AspectTiling, filter_: int) -> list[Image.Image]:
    """Scale an image to tiles, row by row, and to one where there are several."""
    edge, (columns, rows) = tiling.tile, tiling.grid(*image.size)
    tiles = _cut(image.resize((columns * edge, rows * edge), filter_), columns, rows, edge)
    return tiles if len(tiles) == 1 else [*tiles, image.resize((edge, edge), filter_)]


def _padded(image: Image.Image, tiling: AnyresTiling, filter_: int) -> list[Image.Image]:
    """Scale an image to one tile, and to a grid of tiles, on black, row by row."""
    edge = tiling.tile
    whole = image.resize((edge, edge), filter_)
    if not tiling.sizes:
        return [whole]
    size, scaled = tiling.target(*image.size), tiling.scaled(*image.size)
    canvas = Image.new("RGB", size)
    left, top = ((outer - inner) // 2 for outer, inner in zip(size, scaled, strict=True))
    canvas.paste(image.resize(scaled, filter_), (left, top))
    return [whole, *_cut(canvas, *tiling.grid(*image.size), edge)]


def _on_canvas(image: Image.Image, tiling: CanvasTiling, filter_: int) -> list[Image.Image]:
    """Scale an image to tiles, in its shape, on black, row by row, and to one if there are more."""
    edge, (columns, rows) = tiling.tile, tiling.grid(*image.size)
    canvas = Image.new("RGB", (columns * edge, rows * edge))
    canvas.paste(image.resize(tiling.scaled(*image.size), filter_))
    tiles = _cut(canvas, columns, rows, edge)
    return tiles if len(tiles) == 1 else [*tiles, image.resize((edge, edge), filter_)]


def _slices(image: Image.Image, tiling: SliceTiling, filter_: int) -> list[Image.Image]:
    """Scale an image to one frame, and to slices, row by row, if it is cut."""
    columns, rows = tiling.grid(*image.size)
    whole = image.resize(tiling.whole(*image.size), filter_)
    if columns * rows == 1:
        return [whole]
    across, down = tiling.slices(*image.size)
    scaled = image.resize((across, down), filter_)
    return [whole, *_cut(scaled, columns, rows, across // columns, down // rows)]


def _on_white(image: Image.Image, tiling: HdTiling, filter_: int) -> list[Image.Image]:
    """Scale an image to tiles, in its shape, on white, row by row."""
    edge, (columns, rows) = tiling.tile, tiling.grid(*image.size)
    canvas = Image.new("RGB", (columns * edge, rows * edge), "white")
    canvas.paste(image.resize(tiling.scaled(*image.size), filter_))
    return _cut(canvas, columns, rows, edge)


def _all_of(tiles: NDArray[np.uint8], columns: int, rows: int) -> NDArray[np.float32]:
    """All of a grid as one tile: (rows * columns, S, S, 3)  ->  (S, S, 3)."""
    edge = tiles.shape[1]
    grid = tiles.reshape(rows, columns, edge, edge, 3).transpose(0, 2, 1, 3, 4)
    canvas = grid.reshape(rows * edge, columns * edge, 3)
    return _thinned(_thinned(canvas, rows, axis=0), columns, axis=1)


_CUBIC = tuple(map(np.float32, (-0.09375, 0.59375, 0.59375, -0.09375)))
"""Weights of two values on either side of a middle, for a cubic convolution with a = -0.75.

Source: Keys 1981, "Cubic convolution interpolation for digital image processing".
"""


def _thinned(
    values: NDArray[np.uint8 | np.float32], factor: int, *, axis: int
) -> NDArray[np.float32]:
    """One value for each `factor` of an axis, at their middle: exact, of numbers of 8 bits.

    Of an odd factor there is a value in the middle; of an even one the four next to it are mixed.
    Beyond an edge are its own values.
    """
    size = values.shape[axis]
    middle = np.arange(factor // 2, size, factor, dtype=np.int64)
    if factor % 2:
        return values.take(middle, axis).astype(np.float32)
    beside = [
        values.take((middle + offset).clip(0, size - 1), axis).astype(np.float32)
        for offset in (-2, -1, 0, 1)
    ]
    return np.sum([each * weight for each, weight in zip(beside, _CUBIC, strict=True)], axis=0)


def _cut(
    image: Image.Image, columns: int, rows: int, width: int, height: int = 0
) -> list[Image.Image]:
    """Cut an image to frames of this size, or to squares."""
    height = height or width
    corners = [(width * x, height * y) for y in range(rows) for x in range(columns)]
    return [image.crop((x, y, x + width, y + height)) for x, y in corners]


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to the nearest numbers of bfloat16, of two the even one."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def _opaque(image: Image.Image) -> Image.Image:
    """Convert to RGB; transparent pixels are blended with white, as most pages show them."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


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
        tiling: Set: cut the image into tiles of `size`, whatever its aspect ratio, or into slices
            of whole tokens of `size`. Of tiles whose padding has no tokens, all of the image is
            made as they are normalized.
        grid: Set: scale the image to whole tokens of `size`, or pad it with black to them, and keep
            its shape.
        sampling: Set: these are the steps of videos, whose frames are chosen so.
        bfloat16: Whether the results of scaling, subtracting and dividing are rounded to bfloat16.
    """

    size: int
    short_edge: int | None
    resample: int
    scale: float
    mean: Channels
    std: Channels
    tiling: Tiling | AspectTiling | AnyresTiling | CanvasTiling | SliceTiling | HdTiling | None = (
        None
    )
    grid: GridSizes | RowSizes | AreaSizes | PaddedSizes | None = None
    sampling: Sampling | None = None
    bfloat16: bool = False

    def within(self, limits: PixelLimits | None) -> PreprocessorConfig:
        """These steps for an image whose request has limits.

        Raises:
            InvalidRequest: Images are not scaled by such limits, or to no size within these.
        """
        if limits is None:
            return self
        sampling = None if self.sampling is None else self.sampling.within(limits)
        if self.tiling is not None:
            return replace(self, tiling=self.tiling.within(limits), sampling=sampling)
        if self.grid is not None:
            return replace(self, grid=self.grid.within(limits), sampling=sampling)
        check_unscaled(limits)
        return replace(self, sampling=sampling)

    @property
    def frames_max(self) -> int:
        """Maximum number of frames of an image."""
        return 1 if self.tiling is None else self.tiling.frames_max
